"""``tidings key`` and ``tidings token``: key files of encrypted spaces, and access tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from tidings.access.context import TokenClaims
from tidings.access.errors import AuthFailed
from tidings.access.resources import checked_text
from tidings.access.settings import TokenSettings
from tidings.core.clock import datetime_of
from tidings.core.names import check_space
from tidings.log.keys import KeyFile, NoSealingKey
from tidings.server.address import read_address

from .access import as_usage
from .output import ExitCode, UsageProblem, as_typed
from .session import DryRunOption, Session, YesOption, command, confirm, parse_span, read_text, user_audit

key_app = typer.Typer(help="Make and change key files.", rich_markup_mode=None)

KeyFileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The key file.")]
SpaceArgument = Annotated[str, typer.Argument(metavar="SPACE", help="Whose keys.")]


@command(key_app, "create", has_workspace=False, examples="tidings key create keys.json")
async def create(session: Session, file: KeyFileArgument) -> None:
    """
    Make a key file without keys, readable by its owner only.

    Back it up apart from the log: who has both can read everything, and without it nobody can.
    """
    KeyFile.create(file)
    session.out.result({"file": str(file)}, as_typed(f"made {file}; add a key with `tidings key add {file} SPACE`"))


@command(key_app, "add", has_workspace=False, examples="tidings key add keys.json shared:home")
async def add(session: Session, file: KeyFileArgument, space: SpaceArgument) -> None:
    """
    Give a space a new key, which seals from now on.

    Older keys of the space stay, and still open what they sealed. Processes that have the file loaded use
    the new key once they load it again.
    """
    key_id = KeyFile(file).add_key(space)
    done = {"file": str(file), "space_id": space, "key_id": key_id}
    session.out.result(done, f"space {space} is sealed with key {key_id} from now on")


@command(
    key_app,
    "shred",
    examples="tidings key shred keys.json person:alice --dry-run\ntidings key shred keys.json person:alice --audit",
)
async def shred(
    session: Session,
    file: KeyFileArgument,
    space: SpaceArgument,
    *,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
    is_audited: Annotated[
        bool, typer.Option("--audit", help="Record it in the workspace's topic `audit` before it is done.")
    ] = False,
) -> None:
    """
    Take all keys of a space away: what they sealed can never be read again.

    Copies of the key file still hold the keys, and so do processes that loaded it. Exit code 1 if the file
    has no key of the space.
    """
    keys = KeyFile(file)
    if not _has_keys(keys, check_space(space)):
        _show_shredded(session, file, space, 0, f"{file} holds no key of space {space}")
        raise typer.Exit(ExitCode.PROBLEM)
    if is_dry_run:
        _show_shredded(session, file, space, 0, f"the keys of space {space} would be shredded; nothing was changed")
        return
    confirm(session.out, f"Shred the keys of space {space}, for good?", is_yes=is_yes)
    if is_audited:
        details = {"file": str(file), "space_id": space}
        async with session.writing() as log, user_audit().of(log, "key_shred", details):
            count = keys.shred(space)
    else:
        count = keys.shred(space)
    _show_shredded(session, file, space, count, f"shredded {count} keys of space {space}")


def _has_keys(keys: KeyFile, space: str) -> bool:
    try:
        return keys.current(space) is not None
    except NoSealingKey:  # shredded before
        return False


def _show_shredded(session: Session, file: Path, space: str, count: int, text: str) -> None:
    session.out.result({"file": str(file), "space_id": space, "shredded": count}, text)


token_app = typer.Typer(help="Make tokens, and look into them.", rich_markup_mode=None)

SecretOption = Annotated[
    str | None,
    typer.Option(
        "--secret",
        metavar="SECRET",
        envvar="TIDINGS_JWT_SECRET",
        help="The secret of HS256, 32 bytes or more. Others on this machine see arguments: better by environment or file.",
    ),
]
SecretFileOption = Annotated[
    Path | None,
    typer.Option(
        "--secret-file", metavar="FILE", envvar="TIDINGS_JWT_SECRET_FILE", help="A file that holds the secret."
    ),
]
AudienceOption = Annotated[
    str | None, typer.Option("--audience", metavar="NAME", help="Whom the token is for, as the node's settings say.")
]
IssuerOption = Annotated[str | None, typer.Option("--issuer", metavar="NAME", help="Who makes it.")]

_FILE_BYTES_MAX: Final = 1 << 20


def _names(option: str, metavar: str, text: str) -> Any:
    return typer.Option(option, metavar=metavar, help=f"{text} May be repeated.")


@command(
    token_app,
    "issue",
    examples="""
        tidings token issue alice --client-id phone --partition home-1 --expires-in 12h
        tidings token issue browser --topic orders --read-only
        tidings token issue root --role admin --secret-file secret.txt
        tidings token issue worker --topic-prefix orders. --signing-key key.json --audience tidings
    """,
)
async def issue(
    session: Session,
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Whom the token speaks for.")],
    *,
    client_id: Annotated[str | None, typer.Option("--client-id", metavar="ID", help="The device or program.")] = None,
    user_id: Annotated[
        str | None,
        typer.Option("--user-id", metavar="ID", help="The application's user, where events say one (userId)."),
    ] = None,
    partition: Annotated[list[str] | None, _names("--partition", "NAME", "A partition to sync.")] = None,
    partition_prefix: Annotated[
        list[str] | None, _names("--partition-prefix", "TEXT", "All partitions that begin like this.")
    ] = None,
    project: Annotated[list[str] | None, _names("--project", "ID", "A project to sync.")] = None,
    topic: Annotated[list[str] | None, _names("--topic", "NAME", "A topic to publish, read and subscribe to.")] = None,
    topic_prefix: Annotated[
        list[str] | None, _names("--topic-prefix", "TEXT", "All topics that begin like this.")
    ] = None,
    space: Annotated[list[str] | None, _names("--space", "ID", "A space.")] = None,
    space_prefix: Annotated[
        list[str] | None, _names("--space-prefix", "TEXT", "All spaces that begin like this.")
    ] = None,
    group: Annotated[
        list[str] | None, _names("--group", "TOPIC/GROUP", "A group to join, and to create if it is not there.")
    ] = None,
    group_prefix: Annotated[
        list[str] | None, _names("--group-prefix", "TEXT", "All groups that begin like this, as `orders/`.")
    ] = None,
    role: Annotated[list[str] | None, _names("--role", "NAME", "A role; `admin` may do everything.")] = None,
    is_read_only: Annotated[
        bool, typer.Option("--read-only", help="To read, subscribe and sync only, whatever else its subject may do.")
    ] = False,
    expires_in: Annotated[
        str, typer.Option("--expires-in", metavar="SPAN", help="How long it is valid: 90s, 15m, 2h, 7d, 4w.")
    ] = "1h",
    secret: SecretOption = None,
    secret_file: SecretFileOption = None,
    key_file: Annotated[
        Path | None, typer.Option("--signing-key", metavar="FILE", help="A private JSON Web Key to sign with instead.")
    ] = None,
    audience: AudienceOption = None,
    issuer: IssuerOption = None,
) -> None:
    """
    Make a token and print it.

    Sign with the node's secret, or with a private key whose public one is in the node's key set; the secret of a `tidings serve --dev` on the
    workspace is found by itself. The token has an id, by which
    `tidings revoke --token-id` takes it back.
    """
    from tidings.access.tokens import TokenIssuer, TokenVerifier, read_unverified

    with as_usage():
        claims = TokenClaims(
            partitions=_set("--partition", partition),
            partition_prefixes=tuple(sorted(_set("--partition-prefix", partition_prefix))),
            projects=_set("--project", project),
            topics=_set("--topic", topic),
            topic_prefixes=tuple(sorted(_set("--topic-prefix", topic_prefix))),
            spaces=_set("--space", space),
            space_prefixes=tuple(sorted(_set("--space-prefix", space_prefix))),
            groups=_set("--group", group),
            group_prefixes=tuple(sorted(_set("--group-prefix", group_prefix))),
            roles=_set("--role", role),
            is_read_only=is_read_only,
        )
    signing_key = None if key_file is None else _json_of(key_file)
    settings = TokenSettings(
        secret=None if signing_key else _secret(secret, secret_file) or _dev_secret(session),
        audience=audience,
        issuer=issuer,
    )
    if signing_key is None and settings.secret is None:
        raise UsageProblem("there is nothing to sign with", "give TIDINGS_JWT_SECRET, --secret-file or --signing-key")
    maker = TokenIssuer(settings, session.clock, signing_key=signing_key)
    token = maker.issue(subject, client_id=client_id, user_id=user_id, claims=claims, lifetime_s=_seconds(expires_in))
    if settings.secret is not None:
        TokenVerifier(settings, session.clock).verify(token)
    payload = read_unverified(token)[1]
    if session.out.is_json:
        session.out.json(
            {"token": token, "token_id": payload["jti"], "expires_at": _time(payload["exp"]), "payload": payload}
        )
    else:
        session.out.text(token)
        session.out.note(f"for {subject}, until {_time(payload['exp'])}, id {payload['jti']}")


@command(
    token_app,
    "show",
    has_workspace=False,
    examples='tidings token show "$TOKEN"\ntidings token show - --secret-file secret.txt',
)
async def show_token(
    session: Session,
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The token; - reads it from stdin.")],
    *,
    secret: SecretOption = None,
    secret_file: SecretFileOption = None,
    key_set: Annotated[
        Path | None, typer.Option("--key-set", metavar="FILE", help="A JSON Web Key Set to verify it with.")
    ] = None,
    audience: AudienceOption = None,
    issuer: IssuerOption = None,
) -> None:
    """
    Show what a token says and, given a secret or a key set, whether a node with these settings believes it.

    Exit code 1 if it does not.
    """
    from tidings.access.tokens import TokenVerifier, read_unverified

    text = sys.stdin.read(_FILE_BYTES_MAX).strip() if token == "-" else token
    header, payload = read_unverified(text)
    settings = TokenSettings(
        secret=_secret(secret, secret_file),
        key_set=None if key_set is None else msgspec.json.encode(_json_of(key_set)).decode(),
        audience=audience,
        issuer=issuer,
    )
    is_believed, problem = None, None
    if settings.secret is not None or settings.key_set is not None:
        try:
            TokenVerifier(settings, session.clock).verify(text)
            is_believed = True
        except AuthFailed as error:
            is_believed, problem = False, str(error)
    if session.out.is_json:
        session.out.json({"is_believed": is_believed, "problem": problem, "header": header, "payload": payload})
    else:
        verdict = {None: "not checked (no secret or key set was given)", True: "believed", False: problem}[is_believed]
        times = {name: _time(payload[name]) for name in ("iat", "nbf", "exp") if _is_time(payload.get(name))}
        if _is_time(payload.get("exp")) and payload["exp"] * 1_000_000_000 <= session.clock.now_ns():
            times["exp"] += " (expired)"
        session.out.facts("Token", {"verdict": verdict, **header, **payload, **times}.items())
    if is_believed is False:
        raise typer.Exit(ExitCode.PROBLEM)


def _set(option: str, names: list[str] | None) -> frozenset[str]:
    return frozenset(checked_text(option, name) for name in names or ())


def _seconds(text: str) -> int:
    seconds = parse_span(text)
    if not seconds:
        raise UsageProblem(f"--expires-in: {text!r} is not a span of time", "give one as 90s, 15m, 2h, 7d or 4w")
    return seconds


def _dev_secret(session: Session) -> str | None:
    """The secret of the workspace's node, if that is one to try things with and this user's."""
    address = read_address(session.workspace)
    try:
        return (session.layout.dev / "secret").read_text().strip() if address is not None and address.is_dev else None
    except OSError:
        return None


def _secret(secret: str | None, file: Path | None) -> str | None:
    return secret if file is None else read_text(file, _FILE_BYTES_MAX).rstrip("\r\n")


def _json_of(file: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(read_text(file, _FILE_BYTES_MAX))
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, dict):
        raise UsageProblem(f"{file} does not hold a JSON object")
    return found


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 253_402_300_800


def _time(seconds: float) -> str:
    return datetime_of(int(seconds) * 1_000_000_000).isoformat().replace("+00:00", "Z")
