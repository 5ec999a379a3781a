"""Human-style questions, for drafters that are trained on SmolLM2's answers.

`python -m pair.questions FOLDER [SEED] > questions.jsonl` combines topics with ways to ask. It takes the passages to
summarise and rewrite from text that the target generated (in the FOLDER of an earlier `jspec train`), and code from
Python's own library. None of the questions is among `bench/prompts`, on which the result is measured.
"""

import ast
import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from jspec.text import load_tokenizer
from jspec.training import dataset as rows

COUNTS = {"chat": 960, "summary": 320, "rewriting": 320, "code": 320}
MODULES = """
bisect calendar collections colorsys copy csv difflib fnmatch fractions functools glob gettext heapq html imaplib
inspect ipaddress json keyword linecache locale mimetypes netrc numbers operator os posixpath pprint quopri random re
reprlib sched shlex shutil statistics string stringprep tempfile textwrap timeit token tokenize types urllib.parse
uuid warnings wave zipfile
"""
TOPICS = """
volcanoes; the Moon; penguins; the Roman Empire; chess; photosynthesis; jazz; the human heart; bread; earthquakes;
Japan; democracy; solar panels; dinosaurs; the French Revolution; coffee; electric cars; whales; Shakespeare; gravity;
vaccines; the Amazon rainforest; Kenya; money; yoga; black holes; the printing press; spiders; rice; inflation;
artificial intelligence; the Great Wall of China; butterflies; sleep; the Industrial Revolution; cheese; climate
change; Mexico; football; atoms; the Renaissance; horses; tea; the internet; Antarctica; DNA; opera; potatoes;
batteries; Egypt; the Cold War; owls; gardening; electricity; poetry; tides; India; running; enzymes; the Silk Road;
wolves; chocolate; databases; the stock market; Brazil; painting; bacteria; trains; the Vikings; dolphins; olive oil;
satellites; psychology; Canada; swimming; magnets; the Maya; elephants; honey; encryption; taxes; Norway; guitar; the
brain; airplanes; Ancient Greece; ants; pasta; search engines; insurance; Australia; photography; cells; bridges;
Buddhism; sharks; wine; robots; unemployment; Turkey; dance; the immune system; ships; the Aztecs; cats; salt;
programming; budgeting; Iceland; cinema; evolution; clocks; World War I; dogs; spices; spreadsheets; public speaking;
Peru; sculpture; rivers; glass; feudalism; parrots; sugar; cloud computing; time management; Vietnam; novels; rain;
concrete; Napoleon; turtles; soup; email; negotiation; Morocco; theatre; the Sun; paper; Cleopatra; frogs; apples;
passwords; teamwork; Spain; drawing; mountains; steel; Gandhi; rabbits; tomatoes; video games; leadership; Ireland;
singing; the ozone layer; plastic; Marie Curie; bats; fish; Wi-Fi; stress; Ethiopia; architecture; deserts; rubber;
Isaac Newton; cows; bananas; podcasts; friendship; New Zealand; fashion; rainbows; lasers; Leonardo da Vinci; foxes;
garlic; operating systems; motivation; Thailand; museums; snow; microscopes; Martin Luther King; squirrels; corn;
websites; camping; Argentina
"""
PEOPLE = """
my sister; my boss; a colleague; my neighbour; my landlord; a customer; my teacher; my best friend; my grandmother;
a new employee; my son; my team; an old school friend; a job applicant; my partner
"""
ABOUT_TOPICS = (
    "What is the most important thing to know about {}?",
    "Tell me about {}.",
    "Explain {} to a beginner.",
    "Give me five interesting facts about {}.",
    "Write a short poem about {}.",
    "Why do people care about {}?",
    "Write a short story about {}.",
    "What are common misconceptions about {}?",
    "How has our understanding of {} changed over time?",
    "Write three quiz questions about {} with answers.",
    "I have to give a talk about {}. How should I begin?",
    "What should I read to learn more about {}?",
    "Describe {} in three sentences.",
    "Can you explain the history of {}?",
    "Write a paragraph about {} for a school book.",
    "What is the connection between {} and {}?",
    "Compare {} and {}.",
    "Write a dialogue between two friends about {}.",
    "What questions do children ask about {}, and how would you answer them?",
    "List the pros and cons of {}.",
    "Suggest a title and an outline for an article about {}.",
    "What part has {} in everyday life?",
    "Make a plan for a week in which I learn the basics of {}.",
    "Who is well known for work on {}, and why?",
    "Give me an analogy that helps to understand {}.",
    "What would the world be like without {}?",
    "Write a tweet about {}.",
)
ABOUT_PEOPLE = (
    "Write an email to {} to ask for a meeting next week.",
    "How do I tell {} that I disagree, without being rude?",
    "Write a birthday message for {}.",
    "What gift would you suggest for {}? They like {}.",
    "I had an argument with {}. What can I do?",
    "Write a thank-you note to {} for their help with {}.",
    "How can I explain {1} to {0}?",
    "Write an apology to {} for being late.",
    "Help me plan a dinner for {}. They do not eat meat.",
    "Invite {} to an event about {} in two sentences.",
)
SUMMARY = (
    "Summarize this text in one sentence:",
    "Summarise the following in two sentences:",
    "What is this text about?",
    "Give me the main points of this text as a list:",
    "TL;DR:",
    "Write a headline for this text:",
    "Summarize the text below for someone in a hurry:",
    "What are the three key facts in this passage?",
    "Shorten this text to half its length:",
    "Explain in your own words what this says:",
)
REWRITING = (
    "Rewrite this text in simpler words:",
    "Rewrite this more formally:",
    "Correct the grammar of this text:",
    "Make this text friendlier:",
    "Rewrite the following in the past tense:",
    "Turn this text into a list:",
    "Rewrite this text as if a child told it:",
    "Repeat this text, but replace every number by a word:",
    "Rewrite this text in the first person:",
    "Improve the style of this paragraph:",
    "Make this sound more exciting:",
    "Proofread this text and give me the corrected version:",
    "Rewrite this as an email to {}:",
    "Paraphrase this text:",
    "Change the tone of this message to a polite one:",
)
ABOUT_CODE = (
    "What does this Python function do?",
    "Add comments to this code:",
    "Write a docstring for this function:",
    "Rewrite this code so that it is easier to read:",
    "Translate this function to JavaScript:",
    "Write a unit test for this function:",
    "Explain this code line by line:",
    "Is there a bug in this code?",
    "Rename the variables of this function to better names:",
    "Add type hints to this function:",
)
TASKS = """
returns the largest of three numbers; counts the vowels in a string; reverses a list; reads a file and counts its
lines; checks whether a year is a leap year; removes duplicates from a list; sorts a list of dictionaries by a key;
computes the factorial of a number; finds the longest word in a sentence; merges two sorted lists; converts Celsius to
Fahrenheit; checks whether two strings are anagrams; finds all prime numbers up to n; flattens a nested list; computes
the mean and the median of a list; validates an email address; generates a random password; counts how often each word
appears in a text; parses a date; computes the greatest common divisor; searches a sorted list by bisection;
transposes a matrix; prints a multiplication table; rolls two dice; simulates a bank account; splits a list into
chunks of n; finds the missing number in a list; converts a number to binary; capitalises every word; checks whether
brackets are balanced; finds the second largest element; rotates a list by k places; downloads a web page; writes a
list to a CSV file; measures how long a function takes; caches its results; retries when it fails; draws a triangle of
stars; encrypts a text with a Caesar cipher; finds common elements of two lists
"""
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Bash", "Go")
TABLES = (
    "books(id, title, author, year)",
    "employees(id, name, department, salary)",
    "films(id, title, rating)",
    "flights(id, origin, destination, delay)",
    "students(id, name, grade)",
)
QUERIES = (
    "counts the rows",
    "gives the five rows with the highest last column",
    "finds names that appear twice",
    "gives the average of the last column",
    "deletes rows without a name",
)


def _listed(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";")]


def _filled(rng: random.Random, way: str, *fillings: list[str]) -> str:
    """Return a way to ask with all its gaps filled."""
    return way.format(*(rng.choice(fillings[min(i, len(fillings) - 1)]) for i in range(2)))


def chat(rng: random.Random) -> Iterator[str]:
    """Yield questions about the world and about people."""
    topics, people = _listed(TOPICS), _listed(PEOPLE)
    while True:
        yield _filled(rng, rng.choice(ABOUT_TOPICS), topics)
        yield _filled(rng, rng.choice(ABOUT_TOPICS), topics)
        yield _filled(rng, rng.choice(ABOUT_PEOPLE), people, topics)


def given(rng: random.Random, ways: tuple[str, ...], passages: list[str]) -> Iterator[str]:
    """Yield questions that consist of a way to ask and a passage to work on."""
    while True:
        yield f"{_filled(rng, rng.choice(ways), _listed(PEOPLE))}\n\n{rng.choice(passages)}"


def code(rng: random.Random) -> Iterator[str]:
    """Yield questions about functions to write, and about functions of Python's own library to explain or change."""
    functions, tasks = list(_functions()), _listed(TASKS)
    while True:
        yield f"Write a {rng.choice(LANGUAGES)} function that {rng.choice(tasks)}."
        yield f"{rng.choice(ABOUT_CODE)}\n\n```python\n{rng.choice(functions)}\n```"
        yield f"{rng.choice(ABOUT_CODE)}\n\n```python\n{rng.choice(functions)}\n```"
        yield f"Write a SQL query that {rng.choice(QUERIES)}. The table is {rng.choice(TABLES)}."


def _functions() -> Iterator[str]:
    """Yield short functions."""
    for name in MODULES.split():
        module = __import__(name, fromlist=["_"])
        for function in vars(module).values():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                lines = inspect.getsourcelines(function)[0] if function.__code__.co_filename[0] != "<" else []
                if 4 <= len(lines) <= 16 and lines[0].startswith("def "):
                    yield ast.unparse(ast.parse("".join(lines)))


def _passages(folder: Path) -> tuple[list[str], list[str]]:
    """Return longer and shorter paragraphs of prose generated by a target, except text that will be held out."""
    tokenizer = load_tokenizer("smollm2")
    files = [rows.load(file) for file in sorted((folder / "texts").glob("*.safetensors"))]
    learned = {id(row) for row in rows.divide([row for file in files for row in file])[0]}
    greedy = [row for file in files for row in file[::2] if id(row) in learned]  # every second row
    texts = [tokenizer.decode(row.tokens[row.learned]) for row in greedy]
    whole = sorted({part.strip() for text in texts for part in text.split("\n\n") if part.strip().endswith(".")})
    plain = [part for part in whole if part[0].isupper() and "\n" not in part and "<|" not in part]
    return [part for part in plain if 350 < len(part) < 900], [part for part in plain if 100 < len(part) < 450]


def main(folder: str, seed: str = "0") -> None:
    """Print the questions as chats that end with the user's turn. Another seed gives mostly different questions."""
    rng = random.Random(int(seed))
    longer, shorter = _passages(Path(folder))
    kinds = {
        "chat": chat(rng),
        "summary": given(rng, SUMMARY, longer),
        "rewriting": given(rng, REWRITING, shorter),
        "code": code(rng),
    }
    for kind, count in COUNTS.items():
        asked: dict[str, None] = {}
        while len(asked) < count:
            asked[next(kinds[kind])] = None
        for question in asked:
            print(json.dumps({"messages": [{"role": "user", "content": question}]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
