"""Due dates, late rules, the list of students and the secret of their seeds: one YAML file for a class.

secret: any words                   # a seed for each student; leave it out, and all get the same numbers
students: [ada, bob]                # who is in the class: no work handed in is a row of zeros
due:
  1_online_softmax: 2026-03-01 23:59
late: {per_day: 0.1, days: 5}       # a tenth of the points for each day begun; nothing after five days
extensions:
  ada: {1_online_softmax: 2026-03-08}
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timezone
from pathlib import Path

from fa2_studio.course.notebooks import content

DAY = 86_400
KEYS = ("secret", "students", "due", "late", "extensions")


@dataclass(frozen=True)
class Class:
    """What one YAML file says."""

    secret: str = ""
    students: tuple[str, ...] = ()
    due: dict[str, datetime] = field(default_factory=dict)
    extensions: dict[str, dict[str, datetime]] = field(default_factory=dict)
    per_day: float = 0.0
    days: float = math.inf

    def lateness(self, student: str, assignment: str, handed_in: datetime) -> tuple[str, float]:
        """How late in words, and the factor that it leaves of the points."""
        due = self.extensions.get(student, {}).get(assignment) or self.due.get(assignment)
        late = (handed_in - due).total_seconds() if due else 0
        if late <= 0:
            return "", 1.0
        days = math.ceil(late / DAY)
        factor = max(0.0, 1 - self.per_day * days) if days <= self.days else 0.0
        return f"{days} day{'s' if days > 1 else ''} late, × {factor:g}", factor


def read(path: Path, assignments: list[str]) -> Class:
    """The file as a Class; what it cannot mean is a ValueError that names the key."""
    import yaml

    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error
    if not isinstance(said, dict) or (unknown := sorted(set(map(str, said)) - set(KEYS))):
        raise ValueError(f"{path}: got {unknown if isinstance(said, dict) else said!r}; it takes {', '.join(KEYS)}")
    late = mapping(said, "late")
    per_day, days = number(late, "per_day", 0.0), number(late, "days", math.inf)
    students = said.get("students") or []
    if not isinstance(students, list):
        raise ValueError(f"students: got {students!r}; it takes a list of names")
    extended = {str(s): dates(x, f"extensions: {s}", assignments) for s, x in mapping(said, "extensions").items()}
    due = dates(said.get("due"), "due", assignments)
    return Class(str(said.get("secret") or ""), tuple(map(str, students)), due, extended, per_day, days)


def mapping(said: dict, key: str) -> dict:
    found = said.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{key}: got {found!r}; it takes names with values")
    return found


def number(late: dict, key: str, otherwise: float) -> float:
    found = late.get(key, otherwise)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or found < 0:
        raise ValueError(f"late: {key}: got {found!r}; it takes a number of at least 0")
    return float(found)


def dates(said, key: str, assignments: list[str]) -> dict[str, datetime]:
    """{assignment: moment}. A date alone is the end of that day, a time without a zone is this machine's."""
    said, found = mapping({key: said}, key), {}
    for name, moment in said.items():
        if name not in assignments:
            raise ValueError(f"{key}: got {name!r}; it takes one of {', '.join(assignments)}")
        if type(moment) is date:
            moment = datetime.combine(moment, time(23, 59, 59))
        elif isinstance(moment, str):
            try:
                moment = datetime.fromisoformat(moment)
            except ValueError:
                moment = None
        if not isinstance(moment, datetime):
            raise ValueError(f"{key}: {name}: got {said[name]!r}; it takes a date such as 2026-03-01 23:59")
        found[name] = moment.astimezone()
    return found


def handed_in(path: Path) -> datetime:
    """When a file was handed in: by nbgrader's timestamp.txt beside it, or else by the file's own date."""
    with suppress(ValueError):
        text = content(path.parent / "timestamp.txt").decode().strip().removesuffix(" UTC")
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    with suppress(OSError, ValueError, OverflowError):  # no such file, or a date that no calendar has
        return datetime.fromtimestamp(path.lstat().st_mtime, timezone.utc)
    return datetime.fromtimestamp(0, timezone.utc)
