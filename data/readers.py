"""Video-QA sets as their authors publish them, each record turned into the own fields of `data.video_qa`.

A further set is added here: write a function from one record to rows' fields and name it in `FORMATS`. Knows nothing
about decoding, prompts or rewards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from data.answers import LETTERS, answer_text
from data.demo_set import ensure_demo_set
from data.tables import SetError, read_records, text_of
from data.video_qa import ESCAPED, BadRow, RowMistake, VideoQARow, make_row


@dataclass(frozen=True)
class Draft:
    """One row before it is read and checked."""

    fields: Callable[[], Mapping[str, Any]]
    """Gives its own fields; raises RowMistake."""
    id: str = ""
    """The set's own name of the row; empty: its file and place."""
    tags: Mapping[str, str] = field(default_factory=dict)
    part: str = ""
    """Where in its record it stands, `question 2`; empty: it is the whole record."""


@dataclass(frozen=True)
class LoadedSet:
    """What the files of `data.train` or `data.eval` hold."""

    rows: list[VideoQARow]
    bad_rows: list[BadRow]


def load_set(files: Mapping[str, str], media_root: str) -> LoadedSet:
    """Read every file of a set with the reader of its format; rows that break a rule are listed, not dropped silently.

    Args:
        files: path -> name in `FORMATS`.
        media_root: folder that relative video paths start from; empty: the folder of each file.

    Raises:
        SetError: a file cannot be read at all.
    """
    loaded = LoadedSet([], [])
    for name, format_name in files.items():
        path = Path(name).expanduser()
        root = Path(media_root).expanduser() if media_root else path.parent
        if format_name == "demo":
            ensure_demo_set(path)
        for place, record in read_records(path):
            _add_record(loaded, FORMATS[format_name], path, place, record, root)
    return loaded


def _add_record(loaded: LoadedSet, reader: Reader, path: Path, place: str, record: Any, root: Path) -> None:
    """Every row of a record, each for itself: a bad one takes no other along."""
    name = f"{path.stem}:{place.partition(' ')[2]}"
    try:
        if isinstance(record, ValueError):
            raise RowMistake(str(record))
        drafts = list(reader(_mapping(record), path))
    except RowMistake as mistake:
        loaded.bad_rows.append(BadRow(name, f"{path}, {place}", str(mistake)))
        return
    for draft in drafts:
        row_id = draft.id or "#".join(filter(None, (name, draft.part.partition(" ")[2])))
        source = ", ".join(filter(None, (str(path), place, draft.part)))
        try:
            row = make_row(draft.fields(), row_id=row_id, source=source, media_root=root, tags=draft.tags)
            loaded.rows.append(row)
        except RowMistake as mistake:
            loaded.bad_rows.append(BadRow(row_id, source, str(mistake)))


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RowMistake(f"is {type(value).__name__}. Expected fields and values.")
    return value


# --- formats -----------------------------------------------------------------------------------------------------


def own(record: Mapping[str, Any], path: Path) -> Iterator[Draft]:
    """`video`, `question`, `answer`, and if you like `options`, `kind` and `id`."""
    yield Draft(lambda: record, text_of(record, "id"))


_VIDEO_R1_KINDS = {
    "multiple choice": "choice",
    "numerical": "numeric",
    "regression": "mra",
    "ocr": "ocr",
    "free-form": "text",
}


def video_r1(record: Mapping[str, Any], path: Path) -> Iterator[Draft]:
    """Video-R1-260k, and SpaceR-151k, which has its fields: `problem`, `problem_type`, `options`, `solution`, `path`.

    `data_type` image is a video of one frame. `solution` holds the answer in `<answer>` tags.
    """
    tags = {"problem_type": text_of(record, "problem_type").lower(), "data_source": text_of(record, "data_source")}
    yield Draft(lambda: _video_r1_fields(record, tags["problem_type"]), text_of(record, "problem_id"), tags)


def _video_r1_fields(record: Mapping[str, Any], problem_type: str) -> dict[str, Any]:
    if problem_type not in _VIDEO_R1_KINDS:
        raise RowMistake(f"problem_type is {problem_type!r}. Known are {', '.join(_VIDEO_R1_KINDS)}.")
    kind = _VIDEO_R1_KINDS[problem_type]
    return {
        "video": _required(record, "path"),
        "question": _without_placeholder(text_of(record, "problem")),
        "answer": answer_text(text_of(record, "solution")),
        "options": record.get("options") if kind == "choice" else None,
        "kind": kind,
    }


def nextqa(record: Mapping[str, Any], path: Path) -> Iterator[Draft]:
    """NExT-QA multiple choice: `video`, `question`, `answer` (an index; NExT-GQA: the text), `a0` to `a4`, `qid`.

    A `map_vid_vidorID.json` beside the file gives the folder of each video.
    """
    tags = {"type": text_of(record, "type")}
    yield Draft(lambda: _nextqa_fields(record, path.parent), _joined(record, "video", record, "qid"), tags)


def _nextqa_fields(record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    options = [text_of(record, f"a{index}") for index in range(5)]
    video = _required(record, "video")
    return {
        "video": f"{_nextqa_folders(folder).get(video, video)}.mp4",
        "question": _sentence(text_of(record, "question")),
        "answer": _by_index(text_of(record, "answer"), options),
        "options": options,
        "kind": "choice",
    }


@lru_cache(maxsize=4)
def _nextqa_folders(folder: Path) -> dict[str, str]:
    mapping = folder / "map_vid_vidorID.json"
    try:
        return dict(json.loads(mapping.read_text(encoding="utf-8"))) if mapping.is_file() else {}
    except (ValueError, TypeError) as error:
        raise SetError(f"{mapping}: is no JSON dictionary ({error}). Fetch it again.") from error


def llava_video(record: Mapping[str, Any], path: Path) -> Iterator[Draft]:
    """LLaVA-Video-178K: `video` and `conversations`; every human turn and the answer to it is a row of its own.

    Options that stand in the question (`A. ...` lines) become options; the sentence that asks for the letter goes.
    """
    turns = record.get("conversations")
    if not isinstance(turns, list) or len(turns) < 2 or len(turns) % 2:
        raise RowMistake(f"conversations are {str(turns)[:80]!r}. Expected pairs of a human and a gpt turn.")
    tags = {"data_source": text_of(record, "data_source")}
    name = text_of(record, "id")
    for index in range(0, len(turns), 2):
        fields = partial(_llava_fields, record, *turns[index : index + 2])
        number = index // 2
        yield Draft(fields, f"{name}#{number}" if name else "", tags, f"pair {number}")


def _llava_fields(record: Mapping[str, Any], human: Any, model: Any) -> dict[str, Any]:
    speakers = (_mapping(human).get("from"), _mapping(model).get("from"))
    if speakers != ("human", "gpt"):
        raise RowMistake(f"the turns are from {speakers[0]!r}, then {speakers[1]!r}. Expected human, then gpt.")
    question, options = _options_in_text(_without_placeholder(text_of(human, "value")))
    return {
        "video": _required(record, "video"),
        "question": question,
        "answer": text_of(model, "value"),
        "options": options,
        "kind": "choice" if options else "text",
    }


def vsi_bench(record: Mapping[str, Any], path: Path) -> Iterator[Draft]:
    """VSI-Bench: `dataset`, `scene_name`, `question`, `question_type`, `ground_truth`; no `options`: a number, MRA."""
    tags = {"question_type": text_of(record, "question_type")}
    yield Draft(lambda: _vsi_fields(record), text_of(record, "id"), tags)


def _vsi_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    options = record.get("options")
    return {
        "video": "/".join(filter(None, (text_of(record, "dataset"), f"{_required(record, 'scene_name')}.mp4"))),
        "question": text_of(record, "question"),
        "answer": text_of(record, "ground_truth"),
        "options": options,
        "kind": "choice" if options else "mra",
    }


def perception_test(record: Mapping[str, Any], path: Path) -> Iterator[Draft]:
    """Perception Test's multiple-choice questions: `metadata.video_id`; `mc_question` with `options`, `answer_id`."""
    metadata, questions = record.get("metadata"), record.get("mc_question")
    if not isinstance(metadata, Mapping) or not isinstance(questions, list):
        raise RowMistake("metadata or mc_question is missing. Give the set's mc_question_*.json or all_*.json.")
    for number, question in enumerate(questions):
        known = question if isinstance(question, Mapping) else {}
        tags = {name: text_of(known, name) for name in ("area", "reasoning")}
        fields = partial(_perception_fields, metadata, question)
        yield Draft(fields, _joined(metadata, "video_id", known, "id"), tags, f"question {number}")


def _perception_fields(metadata: Mapping[str, Any], question: Any) -> dict[str, Any]:
    options = _mapping(question).get("options")
    if not isinstance(options, list):
        raise RowMistake(f"options are {options!r}. Give a list of texts.")
    return {
        "video": f"{_required(metadata, 'video_id')}.mp4",
        "question": text_of(question, "question"),
        "answer": _by_index(text_of(question, "answer_id"), options),
        "options": options,
        "kind": "choice",
    }


Reader = Callable[[Mapping[str, Any], Path], Iterator[Draft]]

FORMATS: dict[str, Reader] = {
    "own": own,
    "demo": own,
    "video_r1": video_r1,
    "spacer": video_r1,
    "nextqa": nextqa,
    "llava_video": llava_video,
    "vsi_bench": vsi_bench,
    "perception_test": perception_test,
}
"""Value in `data.train` and `data.eval` -> its reader."""


# --- parts of formats --------------------------------------------------------------------------------------------


_SET_MARK = re.compile(r"(?<!\\)<(?:image|video)>")
_OPTION_LINE = re.compile(r"^\s*\(?([A-Z])[.):]\s+(.+?)\s*$")
_ASKS_FOR_LETTER = re.compile(r"(?:respond|answer|reply)\b.*\b(?:letter|option|options)\b", re.IGNORECASE)


def _options_in_text(text: str) -> tuple[str, list[str]]:
    """A question without its option lines, and the options; without any, the text as it is."""
    lines = text.splitlines()
    found = [(index, match) for index, line in enumerate(lines) if (match := _OPTION_LINE.match(line))]
    letters = "".join(match.group(1) for _, match in found)
    if len(found) < 2 or letters != LETTERS[: len(found)]:
        return text, []
    taken = {index for index, _ in found}
    kept = [line for index, line in enumerate(lines) if index not in taken and not _ASKS_FOR_LETTER.search(line)]
    return "\n".join(kept).strip(), [match.group(2) for _, match in found]


def _required(record: Mapping[str, Any], name: str) -> str:
    """A field that every row of a published set has: what names its video."""
    value = record.get(name)
    if not text_of(record, name) or not isinstance(value, str | int):
        raise RowMistake(f"{name} is {value!r}. Every row of this set has a video: give its name.")
    return text_of(record, name)


def _joined(first: Mapping[str, Any], name: str, second: Mapping[str, Any], other: str) -> str:
    """An id of two parts; empty where one is missing, as it would name several rows."""
    parts = text_of(first, name), text_of(second, other)
    return "_".join(parts) if all(parts) else ""


def _without_placeholder(text: str) -> str:
    """The set's own mark for its one video, `<image>` or `<video>`, taken from the start or end of a question."""
    if len(marks := _SET_MARK.findall(text)) > 1:
        raise RowMistake(f"1 video(s) but {len(marks)} marks, {' '.join(marks)}. Leave one; {ESCAPED} is text.")
    return re.sub(r"^\s*<(?:image|video)>\s*|\s*(?<!\\)<(?:image|video)>\s*$", "", text).replace("\\<image>", "<image>")


def _by_index(answer: str, options: Sequence[object]) -> str:
    """The letter of an index from 0, or the answer as it is where that is no index."""
    if not answer.isdecimal():
        return answer
    if int(answer) >= min(len(options), len(LETTERS)):
        raise RowMistake(f"the answer is option {answer}, but there are {len(options)}, counted from 0.")
    return LETTERS[int(answer)]


def _sentence(text: str) -> str:
    """NExT-QA's questions have no question mark."""
    return text if not text or text[-1] in ".?!" else f"{text}?"
