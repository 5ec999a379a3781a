"""Queue many requests, and wait until all have ended."""

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence

from jspec.engine.request import Result
from jspec.engine.scheduler import ActiveRequest


def run_all(
    active_requests: Sequence[ActiveRequest],
    ended: queue.SimpleQueue[Result],
    enqueue: Callable[[ActiveRequest], None],
    cancel: Callable[[ActiveRequest], None],
) -> None:
    """Queue all requests, as many at a time as fit, and wait until they end. After an exception, cancel all requests.

    Args:
        ended: a queue that receives the result of each request that ends.
        enqueue: a function that queues a request, or raises queue.Full.
        cancel: a function that cancels a request.
    """
    unqueued, num_running = deque(active_requests), 0
    try:
        while unqueued or num_running:
            try:
                while unqueued:
                    enqueue(unqueued[0])
                    unqueued.popleft()
                    num_running += 1
            except queue.Full:
                if not num_running:  # other threads' requests fill the queue
                    time.sleep(0.01)
                    continue
            ended.get()
            num_running -= 1
    except BaseException:  # the caller will not read the results
        for active in active_requests:
            cancel(active)
        raise
