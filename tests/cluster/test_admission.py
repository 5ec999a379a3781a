"""The queue in front of the replicas."""

import asyncio

from jspec.cluster.serve.admission import Admission


def run(limits, steps):
    """Return the names in the order in which they got a place.

    Args:
        limits: the limit, in a list that `steps` may change.
        steps: an async function of the admission, a function that starts a request, and the list of names.
    """

    async def main():
        admission, order = Admission(lambda: limits[0]), []

        async def request(name, has_moved, ends):
            async with admission.place(has_moved):
                order.append(name)
                await ends.wait()

        def start(name, has_moved=False):
            ends = asyncio.Event()
            return asyncio.ensure_future(request(name, has_moved, ends)), ends

        await steps(admission, start, order)
        return order

    return asyncio.run(asyncio.wait_for(main(), 5))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_moved_requests_go_first_and_others_in_order():
    async def steps(admission, start, order):
        _, ends = start("a")
        await settle()
        others = [start(name, name.isupper()) for name in "bcDeF"]
        await settle()
        assert order == ["a"]
        for _, end in [(None, ends), *others]:
            end.set()
        await asyncio.gather(*(task for task, _ in others))

    assert run([1], steps) == ["a", "D", "F", "b", "c", "e"]


def test_cancelled_requests_leave_no_gap():
    """A request may be cancelled while it waits, in its place, or in the moment in which it gets one."""

    async def steps(admission, start, order):
        (first, _), (second, _), (third, _), (fourth, ends) = (start(name) for name in "abcd")
        await settle()
        second.cancel()
        await settle()
        first.cancel()
        await asyncio.sleep(0)  # the third gets the place, and is cancelled before it runs
        third.cancel()
        await settle()
        assert order[-1] == "d"
        ends.set()
        await fourth
        assert admission._num_sent == 0 and not admission._waiting

    assert run([1], steps)[0] == "a"


def test_larger_limit_admits_more():
    limits = [1]

    async def steps(admission, start, order):
        for name in "abc":
            start(name)
        await settle()
        limits[0] = 2
        admission.admit()
        await settle()

    assert run(limits, steps) == ["a", "b"]
