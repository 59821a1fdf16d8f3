"""What an answer says: the option, number or time spans that a text means, or that it means none.

Rewards and the checks of a data set read answers with the same functions, so that a ground truth that no reward could
match is refused when it is loaded. Knows nothing about rewards, rows or models.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence

from data.choices import options_named

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Names of options, in order."""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_THINK = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_THINK_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_ARTICLES = ("a", "an", "the")
_LABEL = re.compile(r"\s*[(\[]?([A-Za-z])\s*[.):\]]\s*")

_UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
_UNITS += ["seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: value for value, word in enumerate(_UNITS)} | {word: 10 * (i + 2) for i, word in enumerate(_TENS)}
_SCALES = {"dozen": 12.0, "hundred": 1e2, "thousand": 1e3, "k": 1e3, "million": 1e6, "billion": 1e9}
# Atomic, so that neither a part of a number matches nor a long run of digits takes quadratic time.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.,])[-+]?(?>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?(?!\d|,\d|\.\d)",
    re.IGNORECASE,
)
_PIECE = re.compile(rf"{_NUMBER.pattern}|[a-z]+|[^\s\w-]", re.IGNORECASE)
_NUMBER_CUE = re.compile(r"\b(?:answer(?:\s+is)?|equals|result\s+is)[\s:=(\[\"]*", re.IGNORECASE)
_DENIED = re.compile(
    rf"(?:{_NUMBER.pattern}\s+(?:is|are|was|were)\s+)?"
    r"\b(?:not|never|neither|nor|cannot|[a-z]+n['\u2019]t|at\s+least|at\s+most|up\s+to|instead\s+of"
    r"|(?:more|less|fewer|greater|smaller|other|rather)\s+than)\b"
    r"(?>(?:(?!\bbut\b|[.,;!?](?!\d)).)*)",
    re.IGNORECASE | re.DOTALL,
)
"""What is said not to be, or only bounded, up to the end of its clause."""
_TANGLED = re.compile(
    rf"#\s*[-+/:^~x\u2044\u00d7]\s*#|#[a-z]+\d|(?<![\w#])-\s+(?:#|(?:{'|'.join(_WORDS)})\b)|(?<![a-z\d])\d",
    re.IGNORECASE,
)
"""Among numbers written `#`: `1/2`, `3-4`, `1m80`, `3,5` are not one number, and `- 3` may be an item of a list."""
_REWRITTEN = [
    (r"(?<=m)\^?[23\u00b2\u00b3](?!\w)", ""),  # square metres
    (r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u2070-\u2079\u00bc-\u00be\u2150-\u215e])", "^"),  # or 3 1/2 would turn into 31/2
    (r"[\u2212\u2013]", "-"),
    (r"[*_`$#\\]", " "),
    (r"\b(?:minus|negative)\s+(?=[\d.])", "-"),
    (r"(?<!\w)-(?=[a-z])", "minus "),
    (r"\b(?:no|this|that|the|which|each|every|another)\s+one\b", " "),
    (r"\band\s+a\s+half\b", "plushalf"),
    (rf"(?<!half )\ban?\s+(?={'|'.join(_SCALES)})", "one "),
]
"""Pattern and what stands for it before numbers are read."""
_TIME = re.compile(r"\d+(?::[0-5]?\d){1,2}(?:\.\d+)?|\d+(?:\.\d+)?")


def answer_text(response: str) -> str:
    """What a response gives as its answer: the last `<answer>` element, even if it was cut short, else everything.

    What stands in `<think>` elements is not given.
    """
    response = _without_thinking(response)
    tags = list(_TAG.finditer(response))
    closing = next((place for place in reversed(range(len(tags))) if tags[place].group(1)), None)
    last = len(tags) if closing is None else closing
    opening = next((tag for tag in reversed(tags[:last]) if not tag.group(1)), None)
    start = 0 if opening is None else opening.end()
    end = len(response) if closing is None else tags[closing].start()
    return response[start:end].strip()


def _without_thinking(response: str) -> str:
    """Without `<think>` elements: one without a start began in the prompt, one without an end was cut short."""
    *closed, rest = _THINK_END.split(response)
    parts = [_THINK.split(part, maxsplit=1) for part in closed]
    said, *thought = _THINK.split(rest, maxsplit=1)
    answered = _TAG.search(thought[0]) if thought else None
    tail = thought[0][answered.start() :] if answered else ""
    return " ".join([*(part[0] for part in parts if len(part) == 2), said, tail])


def plain_words(text: str) -> list[str]:
    """Lower-case words without punctuation; a letter of a script without spaces is a word of its own."""
    folded = unicodedata.normalize("NFKC", text).lower()
    return re.findall(
        r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+", folded
    )


def unlabelled_options(options: Sequence[str]) -> tuple[str, ...]:
    """Options without their own `A.`, `(B)` labels, where every one has the label of its place."""
    labels = [_LABEL.match(option) for option in options]
    in_order = all(match and match.group(1).upper() == LETTERS[i] for i, match in enumerate(labels) if i < 26)
    if options and len(options) <= len(LETTERS) and in_order:
        return tuple(option[match.end() :].strip() for option, match in zip(options, labels, strict=True) if match)
    return tuple(option.strip() for option in options)


def parse_choice(text: str, options: Sequence[str]) -> str | None:
    """Letter of the one option that `text` settles on by letter or by words; None where that is none or several.

    What is denied, or only a reason, does not count. `A` before a word in small letters is an article.
    """
    named = options_named(text, _wordings(options), len(options))
    letter = next(iter(named)) if len(named) == 1 else ""
    return letter if letter and letter in LETTERS[: len(options)] else None


def _wordings(options: Sequence[str]) -> str:
    """Pattern of any option's words, an article before them or not; the group that matched is its letter."""
    spoken = [_sign_and_words(option) for option in options]
    bare = [(sign, *(words[1:] if words[1:] and words[0] in _ARTICLES else words)) for sign, *words in spoken]
    article = r"(?:\b(?-i:A(?= [a-z])|an?|An|[Tt]he)\s+)?"
    if len(set(bare)) < len(bare):
        bare, article = spoken, ""
    patterns: list[tuple[int, str]] = []
    for letter, (sign, *words) in zip(LETTERS, bare, strict=False):
        if not words or bare.count((sign, *words)) > 1 or re.fullmatch(r"[a-z]", "".join(words)):
            continue
        joined = r"\W*".join(map(re.escape, words))
        before = r"(?<![\w.,-])" if words[0][0].isdigit() else r"(?<![A-Za-z0-9])"
        after = r"(?![A-Za-z0-9]|[.,]\d)"
        if words == ["no"]:
            after += r"(?! (?!because|since)\w)"  # `no` before a word is no answer
        patterns.append((len(joined), rf"(?P<{letter}>{article}{before}{sign}{joined}{after})"))
    longest_first = [pattern for _, pattern in sorted(patterns, reverse=True)]
    return rf"(?i:{'|'.join(longest_first) or '(?!)'})"


def _sign_and_words(option: str) -> tuple[str, ...]:
    return ("-" if re.match(r"\s*[-\u2212]\s*\d", option) else "", *plain_words(option))


def parse_number(text: str) -> float | None:
    """The one number that `text` states, in digits or words, a unit beside it or not; None where it is none or several.

    `1,000` is a thousand; `3,5`, `1/2`, `3-4` and `at least 3` are nobody's number here, so they are None.
    """
    clean = text
    for pattern, instead in _REWRITTEN:
        clean = re.sub(pattern, instead, clean, flags=re.IGNORECASE)
    clean = unicodedata.normalize("NFKC", clean).strip()
    if lead := list(_NUMBER_CUE.finditer(clean)):
        from_cue = parse_number(clean[lead[-1].end() :]) if lead[-1].end() < len(clean) else None
        if from_cue is not None:
            return from_cue
    clean = _DENIED.sub(" ", clean)
    values = set() if _TANGLED.search(_NUMBER.sub("#", clean)) else set(_stated_numbers(clean))
    value = next(iter(values)) if len(values) == 1 else math.nan
    return value if math.isfinite(value) else None


def _stated_numbers(text: str) -> list[float]:
    """`3`, `3 million`, `twenty-one`, `two thousand and five`; NaN for `three quarters` and `two point five`."""
    values: list[float] = []
    run: list[str] = []
    for piece in [*_PIECE.findall(text.lower()), ""]:
        if run and _goes_on(run[-1], piece):
            run.append(piece)
            continue
        if run and run != ["minus"]:
            is_part = re.fullmatch(r"half|point|(?:third|quarter|fifth|tenth)s?", piece)
            values.append(math.nan if is_part else _run_value(run))
        starts = piece in _WORDS or piece in ("minus", "negative") or _NUMBER.fullmatch(piece)
        run = ["minus" if piece == "negative" else piece] if starts else []
    return values


def _goes_on(last: str, piece: str) -> bool:
    """True where a number that has come to `last` goes on with `piece`."""
    if piece in _SCALES or piece == "plushalf":
        return last not in ("minus", "and")
    if piece == "and":
        return last in _SCALES
    is_unit_of_ten = last in _TENS and 0 < _WORDS.get(piece, 0) < 10
    return is_unit_of_ten or (piece in _WORDS and (last in _SCALES or last in ("minus", "and")))


def _run_value(run: Sequence[str]) -> float:
    total = current = 0.0
    for piece in run:
        if piece in _SCALES:
            current *= _SCALES[piece]
            if _SCALES[piece] >= 1000:
                total, current = total + current, 0.0
        elif piece == "plushalf":
            current += 0.5
        elif piece not in ("minus", "and"):
            current += _WORDS[piece] if piece in _WORDS else float(piece.replace(",", ""))
    return -(total + current) if run[0] == "minus" else total + current


def parse_spans(text: str) -> tuple[tuple[float, float], ...] | None:
    """Time spans in seconds, from `[1.2, 5.8]`, `12 to 17.5 s`, `00:12 - 00:17`; None where the text holds no pairs.

    A time too long for a number is none.
    """
    times = [_seconds(found.group()) for found in _TIME.finditer(text)]
    spans = tuple(zip(times[::2], times[1::2], strict=False))
    if not times or len(times) % 2 or not all(start <= end < math.inf for start, end in spans):
        return None
    return spans


def spans_text(value: Sequence[object]) -> str:
    """Spans given as a list, `[1.2, 5.8]` or `[[1.2, 5.8], [7, 9]]`, as the text that `parse_spans` reads."""
    return json.dumps(value)


def _seconds(text: str) -> float:
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part)
    return total
