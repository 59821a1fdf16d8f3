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

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Names of options, in order."""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_LABEL = re.compile(r"\s*[(\[]?([A-Za-z])\s*[.):\]]\s*")
_LINK = r"(?:\s+(?:is|would be|should be|must be|option|choice|letter))*\W*"
_ANSWER_CUE = re.compile(rf"\banswer{_LINK}", re.IGNORECASE)
_OPTION_CUE = re.compile(rf"\b(?:option|choice|choose|chose|pick|select){_LINK}", re.IGNORECASE)
_AFTER_CUE = 100
"""How far after a cue its letters are looked for (characters)."""

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
    """What a response gives as its answer: the last `<answer>` element, even if it was cut short, else everything."""
    tags = list(_TAG.finditer(response))
    closing = next((place for place in reversed(range(len(tags))) if tags[place].group(1)), None)
    last = len(tags) if closing is None else closing
    opening = next((tag for tag in reversed(tags[:last]) if not tag.group(1)), None)
    if opening is None:
        return response.strip()
    end = len(response) if closing is None else tags[closing].start()
    return response[opening.end() : end].strip()


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
    """Letter of the one option that `text` names by its letter or by its words; None where that is none or several.

    `A` before a word in small letters is an article, not an option.
    """
    clean = re.sub(r"\\(?:boxed|text|mathbf|mathrm)", " ", unicodedata.normalize("NFKC", text))
    clean = re.sub(r"[*_`\"'${}~]", " ", clean)
    clean = " ".join(clean.split())
    letters = LETTERS[: len(options)]
    if alone := re.fullmatch(r"\W*([A-Za-z])\W*", clean):
        letter = alone.group(1).upper()
        return letter if letter in letters else None
    named = _letters_in_cues(clean, letters) or _letters_at_start(clean, letters)
    if named:
        return _not_contradicted(named, clean, options)
    return _option_by_words(clean, options)


def _letters_in_cues(clean: str, letters: str) -> set[str]:
    """Letters after the last `the answer is` that has some, `B or C` both; else all after `option` and the like."""
    found = [
        [_enumerated(clean[cue.end() : cue.end() + _AFTER_CUE], letters) for cue in cues.finditer(clean)]
        for cues in (_ANSWER_CUE, _OPTION_CUE)
    ]
    answers = [named for named in found[0] if named]
    return answers[-1] if answers else set().union(*found[1])


def _letters_at_start(clean: str, letters: str) -> set[str]:
    """Letters of `B. Red`, `(B) Red`, `B or C`, `B: Red` and of other labels after them."""
    start = re.match(r"\W*([A-Z])(?=\s*[.):,\]/&]|\s+(?:or|and)\s+[A-Z]\b)", clean) or re.match(
        r"\W*\(([a-zA-Z])\)", clean
    )
    if start is None or start.group(1).upper() not in letters:
        return set()
    rest = clean[start.end() :]
    later = re.findall(r"(?<!\w)([A-Z])(?=[.):,\]]|\s*$|\s+(?:or|and)\b)", rest)
    return {start.group(1).upper(), *(letter for letter in later if letter in letters)}


def _enumerated(text: str, letters: str) -> set[str]:
    """`B`, `(B)`, `b.`, `B or C`, `B, C` at the start of a text."""
    found: set[str] = set()
    while match := re.match(r"\W*([A-Za-z])(?![\w'])", text):
        letter, rest = match.group(1), text[match.end() :]
        ends = re.match(r"\s*(?:$|[^\w\s])", rest) is not None
        joined = re.match(r"\s*(?:or|and|,|/|&)\s*\W*[A-Za-z](?!\w)", rest) is not None
        is_word = letter in "aAI" and not ends and not joined
        if letter.upper() not in letters or is_word or (letter.islower() and not ends and not joined):
            break
        found.add(letter.upper())
        if not joined:
            break
        text = re.sub(r"^\s*(?:or\b|and\b|,|/|&)", "", rest)
    return found


def _not_contradicted(named: set[str], clean: str, options: Sequence[str]) -> str | None:
    """The one named letter, unless what stands beside it is exactly another option's text."""
    if len(named) != 1:
        return None
    letter = next(iter(named))
    beside = plain_words(clean)
    for index, option in enumerate(options):
        words = plain_words(option)
        if LETTERS[index] != letter and words and len(words[0]) > 1 and beside == [letter.lower(), *words]:
            return None
    return letter


def _option_by_words(clean: str, options: Sequence[str]) -> str | None:
    words = plain_words(clean)
    same = [LETTERS[index] for index, option in enumerate(options) if words and plain_words(option) == words]
    labelled = [LETTERS[i] for i, option in enumerate(options) if words == [LETTERS[i].lower(), *plain_words(option)]]
    found = same or labelled
    return found[0] if len(found) == 1 else None


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
