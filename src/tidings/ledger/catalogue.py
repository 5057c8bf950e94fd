"""
The catalogue: which types of subjects, which predicates between them, and which shelves for plugins there are.

It is written as a TOML document and is part of the ledger's state: a command that was right under one document must be right again when
the log is read under the next. So a document is taken over by a command (``SetCatalogue``), and the last document that was good is
always at hand: a ledger whose configured document cannot be used goes on with it and says so.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from tidings.core.validation import explain
from tidings.happenings.happening import Happening
from tidings.happenings.variants import Cardinality, CatalogueFallback, CatalogueReloaded

from .admin_ledger import record_admin_action
from .commands import Command, CommandOutcome
from .errors import ErrorClass, LedgerError
from .state import LedgerState

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
ANY_TYPE: Final = "*"
_NAME_CHARS_MAX: Final = 128


class CatalogueSource(enum.StrEnum):
    """Where the catalogue in use comes from."""

    CONFIGURED = "configured"
    LAST_KNOWN_GOOD = "lkg"
    BUILTIN = "builtin"


class CatalogueInvalid(LedgerError):
    """A catalogue cannot be used; ``place`` names what is wrong in it."""

    code = "ledger.catalogue_invalid"
    error_class = ErrorClass.MISCONFIGURATION
    subclass = "catalogue_invalid"
    text = "the catalogue cannot be used ({place}): {problem}"
    stage: str
    """``parse`` if it cannot be read, ``schema`` if it declares what cannot be."""
    place: str
    problem: str


class _Declaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class ShelfDeclaration(_Declaration, frozen=True):
    """A place for one plugin."""

    name: str
    shape: int
    """The version of the contract that the plugin on it keeps."""
    shape_supports: tuple[int, ...] = ()
    description: str = ""


class RackDeclaration(_Declaration, frozen=True):
    """A group of shelves."""

    name: str
    charter: str
    """What the rack is for."""
    family: str = ""
    kinds: tuple[str, ...] = ()
    shelves: tuple[ShelfDeclaration, ...] = ()


class TypeDeclaration(_Declaration, frozen=True):
    """A type of subjects."""

    name: str
    description: str = ""


class PredicateDeclaration(_Declaration, frozen=True):
    """
    A kind of relation.

    ``source_cardinality`` bounds the targets of one source, ``target_cardinality`` the sources of one target.
    """

    name: str = msgspec.field(name="predicate")
    source_type: str | tuple[str, ...]
    target_type: str | tuple[str, ...]
    """One type, several, or ``*`` for any."""
    source_cardinality: Cardinality = Cardinality.MANY
    target_cardinality: Cardinality = Cardinality.MANY
    inverse: str | None = None
    description: str = ""

    def takes_source(self, subject_type: str) -> bool:
        """Whether a subject of this type may be the source."""
        return _is_of(subject_type, self.source_type)

    def takes_target(self, subject_type: str) -> bool:
        """Whether a subject of this type may be the target."""
        return _is_of(subject_type, self.target_type)


def _is_of(subject_type: str, allowed: str | tuple[str, ...]) -> bool:
    return allowed == ANY_TYPE or subject_type == allowed or (isinstance(allowed, tuple) and subject_type in allowed)


class Catalogue(_Declaration, frozen=True):
    """All declarations. Made from a document with ``parse_catalogue``."""

    schema_version: int
    racks: tuple[RackDeclaration, ...] = ()
    subject_types: tuple[TypeDeclaration, ...] = msgspec.field(name="subjects", default=())
    predicates: tuple[PredicateDeclaration, ...] = msgspec.field(name="relation", default=())

    def check(self) -> None:
        """
        See that it can be used.

        Raises:
            CatalogueInvalid: It cannot.
        """
        if self.schema_version != SCHEMA_VERSION:
            raise _wrong("schema_version", f"is {self.schema_version}; this program knows {SCHEMA_VERSION}")
        _check_names("racks", [rack.name for rack in self.racks])
        for rack in self.racks:
            place = f"racks.{rack.name}"
            if not rack.charter.strip():
                raise _wrong(place, "has no charter")
            _check_names(f"{place}.shelves", [shelf.name for shelf in rack.shelves], may_have_dots=True)
        types = [declared.name for declared in self.subject_types]
        _check_names("subjects", types)
        if ANY_TYPE in types:
            raise _wrong("subjects", f"{ANY_TYPE!r} stands for any type and cannot be declared")
        _check_names("relation", [predicate.name for predicate in self.predicates])
        by_name = {predicate.name: predicate for predicate in self.predicates}
        for predicate in self.predicates:
            place = f"relation.{predicate.name}"
            _check_types(f"{place}.source_type", predicate.source_type, types)
            _check_types(f"{place}.target_type", predicate.target_type, types)
            _check_inverse(place, predicate, by_name)


def _wrong(place: str, problem: str) -> CatalogueInvalid:
    return CatalogueInvalid("schema", place, problem)


def _check_names(place: str, names: Iterable[str], *, may_have_dots: bool = False) -> None:
    seen = set()
    for name in names:
        if not name or len(name) > _NAME_CHARS_MAX or not name.isprintable() or " " in name:
            raise _wrong(place, f"{name!r:.80} is no name: 1 to {_NAME_CHARS_MAX} characters without spaces")
        if not all(name.split(".")) or ("." in name and not may_have_dots):
            raise _wrong(place, f"{name!r} holds a dot; a dot stands between a rack and its shelf")
        if name in seen:
            raise _wrong(place, f"{name!r} is declared twice")
        seen.add(name)


def _check_types(place: str, allowed: str | tuple[str, ...], declared: list[str]) -> None:
    if allowed == ANY_TYPE:
        return
    if not allowed:
        raise _wrong(place, "names no type")
    for name in (allowed,) if isinstance(allowed, str) else allowed:
        if name not in declared:
            raise _wrong(place, f"the type {name!r} is not declared under subjects")


def _check_inverse(place: str, predicate: PredicateDeclaration, by_name: dict[str, PredicateDeclaration]) -> None:
    if predicate.inverse is None:
        return
    inverse = by_name.get(predicate.inverse)
    if inverse is None:
        raise _wrong(f"{place}.inverse", f"the predicate {predicate.inverse!r} is not declared")
    if inverse.inverse != predicate.name:
        raise _wrong(f"{place}.inverse", f"{inverse.name!r} does not name it as its inverse")
    if (inverse.source_type, inverse.target_type) != (predicate.target_type, predicate.source_type):
        raise _wrong(f"{place}.inverse", f"the types of {inverse.name!r} are not its own the other way round")


BUILTIN_CATALOGUE: Final = Catalogue(schema_version=SCHEMA_VERSION)
"""Declares nothing. In use until there is another."""


def parse_catalogue(text: str | bytes) -> Catalogue:
    """
    The catalogue in a TOML document.

    Raises:
        CatalogueInvalid: It is no TOML, has an unknown key or a value of a wrong kind, or declares what cannot be.
    """
    try:
        catalogue = msgspec.toml.decode(text, type=Catalogue)
    except msgspec.ValidationError as error:
        problem, place = explain(error, "document")
        raise CatalogueInvalid("schema", place, problem) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CatalogueInvalid("parse", "document", str(error)) from None
    catalogue.check()
    return catalogue


def load_catalogue(path: Path) -> Catalogue:
    """
    The catalogue in a file.

    Raises:
        CatalogueInvalid: The file cannot be read, or the document in it cannot be used.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CatalogueInvalid("parse", path.name, error.strerror or str(error)) from None
    return parse_catalogue(text)


class _Frozen(msgspec.Struct, frozen=True):
    catalogue: Catalogue
    source: CatalogueSource


class CurrentCatalogue:
    """The catalogue in use."""

    name: ClassVar[str] = "catalogue"
    frozen_type: ClassVar[Any] = _Frozen

    def __init__(self) -> None:
        self.put(BUILTIN_CATALOGUE, CatalogueSource.BUILTIN)

    def freeze(self) -> _Frozen:
        """The document."""
        return _Frozen(self.catalogue, self.source)

    def restore(self, frozen: _Frozen) -> None:
        """Use this document."""
        self.put(frozen.catalogue, frozen.source)

    def put(self, catalogue: Catalogue, source: CatalogueSource) -> None:
        """Use this document."""
        self.catalogue = catalogue
        self.source = source
        self._predicates = {predicate.name: predicate for predicate in catalogue.predicates}
        self._types = frozenset(declared.name for declared in catalogue.subject_types)
        self._racks = {rack.name: rack for rack in catalogue.racks}

    def predicate(self, name: str) -> PredicateDeclaration | None:
        """The declaration of a predicate."""
        return self._predicates.get(name)

    def declares_type(self, subject_type: str) -> bool:
        """Whether subjects of this type may be announced."""
        return subject_type in self._types

    def rack(self, name: str) -> RackDeclaration | None:
        """The declaration of a rack."""
        return self._racks.get(name)


class SetCatalogue(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Use another catalogue.

    Subjects and relations that it does not declare stay as they are; new ones are refused.
    ``problem`` is why this is not the configured one.
    """

    catalogue: Catalogue
    source: CatalogueSource = CatalogueSource.CONFIGURED
    problem: str | None = None
    admin: str | None = None
    """The administrator who does it, for the admin ledger; ``None``: it was configured."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``CatalogueInvalid``."""
        self.catalogue.check()
        current = state.part(CurrentCatalogue)
        happenings: list[Happening] = []
        if self.problem is not None:
            happenings.append(CatalogueFallback(at_ms=at_ms, source=self.source.value, reason=self.problem))
        elif self.catalogue != current.catalogue and current.source is not CatalogueSource.BUILTIN:
            happenings.append(
                CatalogueReloaded(
                    at_ms=at_ms,
                    from_schema_version=current.catalogue.schema_version,
                    to_schema_version=self.catalogue.schema_version,
                    rack_count=len(self.catalogue.racks),
                )
            )
        elif (self.catalogue, self.source) == (current.catalogue, current.source):
            return CommandOutcome(is_changed=False)
        if self.admin is not None:
            record_admin_action(state, at_ms, self.admin, "catalogue_set")
        current.put(self.catalogue, self.source)
        return CommandOutcome(happenings)


def catalogue_command(
    state: LedgerState, configured: Catalogue | Path | None, *, admin: str | None = None
) -> SetCatalogue | None:
    """
    What brings a ledger that is being opened to its catalogue; nothing if it has it.

    A file that cannot be used does not keep the ledger from opening: it goes on with the document it had, or, if it never had one,
    with one that declares nothing, and tells so.

    Args:
        state: The state as it was.
        configured: A catalogue, the file that it is in, or nothing: as it was.
        admin: The administrator who wants it.

    Raises:
        CatalogueInvalid: ``configured`` is a catalogue, and cannot be used.
    """
    current = state.part(CurrentCatalogue)
    if configured is None:
        return None
    if isinstance(configured, Path):
        try:
            configured = load_catalogue(configured)
        except CatalogueInvalid as error:
            is_builtin = current.source is CatalogueSource.BUILTIN
            source = CatalogueSource.BUILTIN if is_builtin else CatalogueSource.LAST_KNOWN_GOOD
            logger.warning(
                "%s; going on with the one that is %s", error, "built in" if is_builtin else "known to be good"
            )
            return SetCatalogue(catalogue=current.catalogue, source=source, problem=error.describe())
    configured.check()
    if (configured, CatalogueSource.CONFIGURED) == (current.catalogue, current.source):
        return None
    return SetCatalogue(catalogue=configured, admin=admin)
