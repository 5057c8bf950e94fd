"""A token is believed for what it says, or refused for what is wrong with it; nothing lies between."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, Final

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from tidings.access.context import OperationContext, TokenClaims
from tidings.access.errors import AuthFailed, TokenExpired, TokenInvalid
from tidings.access.resources import Action, space
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer, TokenVerifier, read_unverified
from tidings.core.errors import SettingsError
from tidings.testing import VirtualClock

SECRET: Final = "0123456789abcdef0123456789abcdef"
HS256: Final = TokenSettings(secret=SECRET)
NS: Final = 1_000_000_000
ED_KEY: Final = ed25519.Ed25519PrivateKey.generate()
EC_KEY: Final = ec.generate_private_key(ec.SECP256R1())
RSA_KEY: Final = rsa.generate_private_key(public_exponent=65537, key_size=2048)
PRIVATE_KEYS: Final[dict[str, Any]] = {"EdDSA": ED_KEY, "ES256": EC_KEY, "RS256": RSA_KEY}
CONVERTERS: Final[dict[str, Callable[..., Any]]] = {
    "EdDSA": jwt.algorithms.OKPAlgorithm.to_jwk,
    "ES256": jwt.algorithms.ECAlgorithm.to_jwk,
    "RS256": jwt.algorithms.RSAAlgorithm.to_jwk,
}


def public_jwk(algorithm: str, **more: Any) -> dict[str, Any]:
    return {**CONVERTERS[algorithm](PRIVATE_KEYS[algorithm].public_key(), as_dict=True), **more}


def private_jwk(algorithm: str, **more: Any) -> dict[str, Any]:
    return {**CONVERTERS[algorithm](PRIVATE_KEYS[algorithm], as_dict=True), **more}


def key_set(*keys: dict[str, Any]) -> str:
    return json.dumps({"keys": keys})


def signed(payload: Any, *, key: Any = SECRET, algorithm: str = "HS256", headers: dict[str, Any] | None = None) -> str:
    """A token with any payload, as a stranger's library would make it."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return jwt.PyJWS().encode(data, key, algorithm=algorithm, headers=headers)


def now_s(clock: VirtualClock) -> int:
    return clock.now_ns() // NS


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def verified(clock: VirtualClock, payload: dict[str, Any], settings: TokenSettings = HS256) -> OperationContext:
    """The context of a token that is good for an hour unless its payload says otherwise."""
    return TokenVerifier(settings, clock).verify(signed({"sub": "alice", "exp": now_s(clock) + 3600, **payload}))


# What is believed


def test_a_token_becomes_a_frozen_context(clock: VirtualClock) -> None:
    """Every claim that is read arrives, and nothing of it can be changed."""
    exp = now_s(clock) + 60
    context = verified(
        clock,
        {
            "exp": exp,
            "client_id": "phone",
            "userId": "u-7",
            "jti": "t1",
            "allowed_partitions": ["p1", "p2"],
            "allowed_partition_prefixes": ["home-"],
            "projectIds": ["x"],
            "topics": ["orders"],
            "topic_prefixes": ["pub."],
            "spaces": ["shared:home"],
            "space_prefixes": ["team:"],
            "roles": ["editor"],
            "something_else": {"is": "passed over"},
        },
    )

    assert context.trust is not None
    assert msgspec.structs.replace(context, trust=None) == OperationContext(
        "alice",
        "phone",
        (exp + 30) * NS,
        "t1",
        TokenClaims(
            partitions=frozenset({"p1", "p2"}),
            partition_prefixes=("home-",),
            projects=frozenset({"x"}),
            topics=frozenset({"orders"}),
            topic_prefixes=("pub.",),
            spaces=frozenset({"shared:home"}),
            space_prefixes=("team:",),
            roles=frozenset({"editor"}),
        ),
        "u-7",
    )
    with pytest.raises(AttributeError):
        context.subject = "bob"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"clientId": "phone"}, ("alice", "phone")),
        ({"client_id": "phone", "clientId": "phone"}, ("alice", "phone")),
        ({}, ("alice", None)),
    ],
)
def test_both_spellings_of_the_client_are_read(
    clock: VirtualClock, payload: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    """``client_id`` and ``clientId`` mean the same."""
    context = verified(clock, payload)

    assert (context.subject, context.client_id) == expected


@pytest.mark.parametrize("claims", [{"spaces": []}, {"space_prefixes": []}, {"spaces": [], "space_prefixes": []}])
def test_an_empty_list_of_spaces_leaves_none(clock: VirtualClock, claims: dict[str, Any]) -> None:
    """A token that speaks of spaces and names none is bound to nothing; one that does not speak of them is not bound."""
    bound, free = verified(clock, claims), verified(clock, {})
    issued = TokenIssuer(HS256, clock).issue("alice", claims=bound.claims)

    assert not bound.claims.cover(Action.READ, space("home"))
    assert free.claims.cover(Action.READ, space("home"))
    assert not TokenVerifier(HS256, clock).verify(issued).claims.cover(Action.READ, space("home"))


def test_a_client_without_a_subject_is_the_subject(clock: VirtualClock) -> None:
    """A sync client's token may name the client only."""
    token = signed({"clientId": "phone", "exp": now_s(clock) + 60})

    assert TokenVerifier(HS256, clock).verify(token).subject == "phone"


@pytest.mark.parametrize("spelling", ["projectIds", "project_ids"])
def test_both_spellings_of_projects_are_read(clock: VirtualClock, spelling: str) -> None:
    """``projectIds`` and ``project_ids`` mean the same."""
    assert verified(clock, {spelling: ["a"]}).claims.projects == {"a"}


def test_names_are_normalised(clock: VirtualClock) -> None:
    """A partition written with a combining accent is the one that the log stores."""
    assert verified(clock, {"allowed_partitions": ["cafe\u0301"]}).claims.partitions == {"caf\u00e9"}


@pytest.mark.parametrize("algorithm", ["EdDSA", "ES256", "RS256"])
def test_a_key_set_verifies_what_its_private_keys_sign(clock: VirtualClock, algorithm: str) -> None:
    """Tokens signed with each kind of key are believed, by their key id and, where only one key fits, without."""
    settings = TokenSettings(key_set=key_set(*(public_jwk(each, kid=each) for each in PRIVATE_KEYS)))
    verifier = TokenVerifier(settings, clock)
    by_id = TokenIssuer(settings, clock, signing_key=private_jwk(algorithm, kid=algorithm)).issue("alice")
    without = TokenIssuer(settings, clock, signing_key=private_jwk(algorithm)).issue("alice")

    assert verifier.verify(by_id).subject == verifier.verify(without).subject == "alice"


def test_what_is_issued_is_believed(clock: VirtualClock) -> None:
    """Issuer and verifier with the same settings agree about subject, client, claims and expiry."""
    settings = TokenSettings(secret=SECRET, audience="tidings", issuer="us")
    claims = TokenClaims(partitions=frozenset({"p"}), topic_prefixes=("a.",), roles=frozenset({"admin"}))
    token = TokenIssuer(settings, clock, make_id=lambda: "id-1").issue(
        "alice", client_id="phone", claims=claims, lifetime_s=60
    )

    context = TokenVerifier(settings, clock).verify(token)

    assert context.trust is not None
    plain = msgspec.structs.replace(context, trust=None)
    assert plain == OperationContext("alice", "phone", clock.now_ns() + 90 * NS, "id-1", claims)
    assert read_unverified(token)[1]["aud"] == "tidings"


def test_other_keys_can_be_loaded(clock: VirtualClock) -> None:
    """After a reload the new secret counts and the old one does not; a bad one changes nothing."""
    other = TokenSettings(secret=SECRET[::-1])
    old, new = (TokenIssuer(settings, clock).issue("alice") for settings in (HS256, other))
    verifier = TokenVerifier(HS256, clock)

    verifier.reload(other)

    assert verifier.verify(new).subject == "alice"
    with pytest.raises(TokenInvalid):
        verifier.verify(old)
    with pytest.raises(SettingsError):
        verifier.reload(TokenSettings(secret="short"))
    assert verifier.verify(new).subject == "alice"


# Times


def test_a_token_expires(clock: VirtualClock) -> None:
    """It is believed until its expiry and the leeway have passed, to the nanosecond, and its context says when."""
    exp = now_s(clock) + 60
    token = signed({"sub": "alice", "exp": exp})
    verifier = TokenVerifier(HS256, clock)
    context = verifier.verify(token)
    assert context.expires_at_ns == (exp + 30) * NS
    clock.jump((exp + 30) - now_s(clock) - 1e-9)
    assert verifier.verify(token) == context
    assert not context.is_expired(clock.now_ns())

    clock.jump(1e-9)

    assert context.is_expired(clock.now_ns())
    with pytest.raises(TokenExpired) as caught:
        verifier.verify(token)
    assert caught.value.expired_at_ns == context.expires_at_ns


def test_a_token_without_expiry_is_refused(clock: VirtualClock) -> None:
    """A token must say when it ends."""
    with pytest.raises(TokenInvalid, match="never expires"):
        TokenVerifier(HS256, clock).verify(signed({"sub": "alice"}))


@pytest.mark.parametrize("issued_ago_s", [0, 3_600, None])
def test_a_token_that_lives_too_long_is_refused(clock: VirtualClock, issued_ago_s: int | None) -> None:
    """From its issue to its end at most the set time passes; without a time of issue, from now on."""
    settings = TokenSettings(secret=SECRET, lifetime_s_max=7_200, leeway_s=0)
    begin = now_s(clock) - (issued_ago_s or 0)
    issue = {} if issued_ago_s is None else {"iat": begin}
    verifier = TokenVerifier(settings, clock)

    assert verifier.verify(signed({"sub": "alice", "exp": begin + 7_200, **issue})).subject == "alice"
    with pytest.raises(TokenInvalid, match="lives longer"):
        verifier.verify(signed({"sub": "alice", "exp": begin + 7_201, **issue}))
    with pytest.raises(TokenInvalid, match="would live longer"):
        TokenIssuer(settings, clock).issue("alice", lifetime_s=7_201)


@pytest.mark.parametrize("claim", ["nbf", "iat"])
def test_a_token_from_the_future_is_refused(clock: VirtualClock, claim: str) -> None:
    """What begins later than the leeway allows is not valid yet; within the leeway clocks may differ."""
    assert verified(clock, {claim: now_s(clock) + 30}).subject == "alice"
    with pytest.raises(TokenInvalid, match="not valid yet"):
        verified(clock, {claim: now_s(clock) + 31})


def test_fractions_of_seconds_are_times(clock: VirtualClock) -> None:
    """RFC 7519 allows fractions, and some issuers write them."""
    assert verified(clock, {"exp": now_s(clock) + 0.5}).expires_at_ns == clock.now_ns() + 30 * NS + NS // 2


# Who it is for


@pytest.mark.parametrize("audience", ["tidings", ["other", "tidings"]])
def test_the_audience_must_be_ours(clock: VirtualClock, audience: object) -> None:
    """One audience or a list of them; ours must be there."""
    settings = TokenSettings(secret=SECRET, audience="tidings")

    assert verified(clock, {"aud": audience}, settings).subject == "alice"


@pytest.mark.parametrize(
    ("settings", "payload"),
    [
        ({"audience": "tidings"}, {}),
        ({"audience": "tidings"}, {"aud": "other"}),
        ({"audience": "tidings"}, {"aud": []}),
        ({"audience": "tidings"}, {"aud": "tidingss"}),
        ({}, {"aud": "anybody"}),
        ({"issuer": "us"}, {}),
        ({"issuer": "us"}, {"iss": "them"}),
    ],
)
def test_a_token_for_others_or_from_others_is_refused(
    clock: VirtualClock, settings: dict[str, str], payload: dict[str, Any]
) -> None:
    """Another audience, none where one is asked for, one where we have none, another issuer."""
    with pytest.raises(TokenInvalid):
        verified(clock, payload, TokenSettings(secret=SECRET, **settings))  # type: ignore[arg-type]


# TokenClaims that are not what they should be


@pytest.mark.parametrize(
    "payload",
    [
        {"sub": 7},
        {"sub": None},
        {"sub": ""},
        {"sub": "a\nb"},
        {"sub": "x" * 257},
        {"client_id": ["phone"]},
        {"client_id": "a", "clientId": "b"},
        {"jti": 1},
        {"exp": "tomorrow"},
        {"exp": True},
        {"exp": -1},
        {"exp": 1e300},
        {"exp": None},
        {"nbf": "0"},
        {"iat": []},
        {"aud": {"a": 1}},
        {"iss": 1},
        {"allowed_partitions": "p1"},
        {"allowed_partitions": [1]},
        {"allowed_partitions": [None]},
        {"allowed_partitions": {"p1": True}},
        {"allowed_partitions": None},
        {"allowed_partitions": [""]},
        {"allowed_partition_prefixes": [""]},
        {"allowed_partition_prefixes": "*"},
        {"projectIds": "p"},
        {"projectIds": ["a"], "project_ids": ["a", "b"]},
        {"topics": "orders"},
        {"topic_prefixes": [""]},
        {"spaces": 1},
        {"space_prefixes": [[]]},
        {"spaces": None},
        {"user_id": 7},
        {"userId": ""},
        {"user_id": "a", "userId": "b"},
        {"roles": "admin"},
        {"roles": {"admin": 1}},
        {"roles": ["admin", 1]},
    ],
    ids=json.dumps,
)
def test_a_mistyped_claim_refuses_the_token(clock: VirtualClock, payload: dict[str, Any]) -> None:
    """A claim of the wrong type or an impossible name gives nothing, not even the rest of the token."""
    with pytest.raises(TokenInvalid):
        verified(clock, payload)


def test_a_token_for_nobody_is_refused(clock: VirtualClock) -> None:
    """Neither subject nor client: nobody to decide about."""
    with pytest.raises(TokenInvalid, match="neither sub nor client_id"):
        TokenVerifier(HS256, clock).verify(signed({"exp": now_s(clock) + 60}))


@pytest.mark.parametrize("payload", [b"", b"[]", b"null", b'"x"', b"{", b"\xff", b"[" * 5000])
def test_a_payload_that_is_no_object_is_refused(clock: VirtualClock, payload: bytes) -> None:
    """Signed nonsense is nonsense."""
    with pytest.raises(TokenInvalid):
        TokenVerifier(HS256, clock).verify(signed(payload))


# Signatures and algorithms


def test_another_secret_is_refused(clock: VirtualClock) -> None:
    """A token that somebody else signed is not believed."""
    token = signed({"sub": "alice", "exp": now_s(clock) + 60}, key=SECRET[::-1])

    with pytest.raises(TokenInvalid, match="signature"):
        TokenVerifier(HS256, clock).verify(token)


def unsigned(alg: str, clock: VirtualClock) -> str:
    parts = ({"alg": alg, "typ": "JWT"}, {"sub": "alice", "exp": now_s(clock) + 60, "roles": ["admin"]})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts) + "."


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "nOnE", ""])
def test_an_unsigned_token_is_refused(clock: VirtualClock, alg: str) -> None:
    """``none`` in any spelling is no algorithm."""
    with pytest.raises(TokenInvalid):
        TokenVerifier(HS256, clock).verify(unsigned(alg, clock))


def test_a_public_key_is_no_secret(clock: VirtualClock) -> None:
    """A token signed by HMAC with the text of a public key is refused, whatever its key id says."""
    pem = RSA_KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    numbers = public_jwk("RS256", kid="k1")
    payload = {"sub": "alice", "exp": now_s(clock) + 60}
    head, body = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
        for part in ({"alg": "HS256", "kid": "k1"}, payload)
    )
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(head + b"." + body, pem)
    token = b".".join((head, body, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()

    for settings in (
        TokenSettings(key_set=key_set(numbers)),
        TokenSettings(key_set=key_set(numbers), secret=SECRET),
    ):
        with pytest.raises(TokenInvalid):
            TokenVerifier(settings, clock).verify(token)


def test_a_key_serves_its_own_algorithm_only(clock: VirtualClock) -> None:
    """A good RS384 signature by a key of the set is refused: the key's kind says RS256."""
    payload = {"sub": "alice", "exp": now_s(clock) + 60}
    token = signed(payload, key=RSA_KEY, algorithm="RS384", headers={"kid": "k1"})

    with pytest.raises(TokenInvalid, match="algorithm"):
        TokenVerifier(TokenSettings(key_set=key_set(public_jwk("RS256", kid="k1"))), clock).verify(token)


def test_an_algorithm_can_be_turned_off(clock: VirtualClock) -> None:
    """A key whose algorithm is not on the list verifies nothing."""
    settings = TokenSettings(secret=SECRET, algorithms=("EdDSA",))

    with pytest.raises(TokenInvalid):
        verified(clock, {}, settings)


def test_an_unknown_key_id_is_refused(clock: VirtualClock) -> None:
    """A key that was taken out of the set no longer counts, although another one would fit."""
    settings = TokenSettings(key_set=key_set(public_jwk("EdDSA", kid="new")))
    token = TokenIssuer(settings, clock, signing_key=private_jwk("EdDSA", kid="old")).issue("alice")

    with pytest.raises(TokenInvalid, match="no key fits"):
        TokenVerifier(settings, clock).verify(token)


def test_several_keys_need_a_key_id(clock: VirtualClock) -> None:
    """Where two keys could be meant, none is guessed."""
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    second = {**jwt.algorithms.OKPAlgorithm.to_jwk(other, as_dict=True), "kid": "b"}
    settings = TokenSettings(key_set=key_set(public_jwk("EdDSA", kid="a"), second))
    token = TokenIssuer(settings, clock, signing_key=private_jwk("EdDSA")).issue("alice")

    with pytest.raises(TokenInvalid, match="several keys"):
        TokenVerifier(settings, clock).verify(token)


@pytest.mark.parametrize("headers", [{"crit": ["exp"]}, {"crit": ["x"], "x": 1}, {"crit": []}, {"b64": True}])
def test_extensions_are_refused(clock: VirtualClock, headers: dict[str, Any]) -> None:
    """A token that says it must not be read without an extension is not read."""
    head = {"alg": "HS256", **headers}
    body = {"sub": "alice", "exp": now_s(clock) + 60}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (head, body)]
    algorithm = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    signature = base64.urlsafe_b64encode(algorithm.sign(b".".join(parts), SECRET.encode())).rstrip(b"=")

    with pytest.raises(TokenInvalid):
        TokenVerifier(HS256, clock).verify(b".".join((*parts, signature)).decode())


def test_without_keys_nothing_is_believed(clock: VirtualClock) -> None:
    """A verifier without secret and key set refuses every token."""
    with pytest.raises(TokenInvalid, match="no keys"):
        verified(clock, {}, TokenSettings())


# Nonsense


@pytest.mark.parametrize(
    "token", ["", ".", "..", "...", "a.b.c", "e30.e30.e30", "e30.e30.", "null", "\u00e9.a.b", "W10.e30.AA", "\ud800"]
)
def test_what_is_no_token_is_refused(clock: VirtualClock, token: str) -> None:
    """Text that is no JWT gets the same kind of answer as a bad one."""
    with pytest.raises(TokenInvalid):
        TokenVerifier(HS256, clock).verify(token)


def test_a_long_token_is_refused_unread(clock: VirtualClock) -> None:
    """Length is checked first; issuing one too long is refused as well."""
    settings = TokenSettings(secret=SECRET, token_bytes_max=300)
    token = signed({"sub": "alice", "exp": now_s(clock) + 60, "pad": "x" * 300})

    with pytest.raises(TokenInvalid, match="longer than 300"):
        TokenVerifier(settings, clock).verify(token)
    with pytest.raises(TokenInvalid, match="longer than 300"):
        TokenIssuer(settings, clock).issue("alice", claims=TokenClaims(topics=frozenset(f"t{n}" for n in range(100))))


@given(st.data())
def test_a_changed_character_never_passes(data: st.DataObject) -> None:
    """No change of one character gives a token that speaks for anybody."""
    clock = VirtualClock()
    token = TokenIssuer(HS256, clock, make_id=lambda: "t").issue("alice")
    place = data.draw(st.integers(0, len(token) - 1))
    letter = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda each: each != token[place]))

    with pytest.raises(AuthFailed):
        TokenVerifier(HS256, clock).verify(token[:place] + letter + token[place + 1 :])


# Settings and issuing


@pytest.mark.parametrize("secret", ["", "x" * 31, "\u00e9" * 15])
def test_a_short_secret_is_refused(clock: VirtualClock, secret: str) -> None:
    """Less than 32 bytes is no secret, for verifying and for issuing; the error does not repeat it."""
    for kind in (TokenVerifier, TokenIssuer):
        with pytest.raises(SettingsError) as caught:
            kind(TokenSettings(secret=secret), clock)
        assert caught.value.path == "access.tokens.secret"
        assert not secret or secret not in str(caught.value)


def test_a_secret_is_not_shown() -> None:
    """Settings can be logged."""
    assert SECRET not in repr(HS256)
    assert SECRET not in str(HS256)


@pytest.mark.parametrize(
    "given_set",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"keys": {}}',
        '{"keys": [1]}',
        '{"keys": [{}]}',
        '{"keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"}]}',
        '{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}',
        key_set(private_jwk("EdDSA")),
        key_set(public_jwk("EdDSA", alg="RS256")),
        key_set(public_jwk("RS256", alg="HS256")),
        key_set(public_jwk("EdDSA", kid=7)),
        key_set(public_jwk("EdDSA", kid="a"), public_jwk("ES256", kid="a")),
        key_set(jwt.algorithms.ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP384R1()).public_key(), as_dict=True)),
        key_set(*({"kty": "EC"} for _ in range(101))),
    ],
)
def test_a_key_set_that_cannot_be_used_is_refused(clock: VirtualClock, given_set: str) -> None:
    """Secrets, private keys, other curves, contradictions and nonsense stop the node at its start."""
    with pytest.raises(SettingsError) as caught:
        TokenVerifier(TokenSettings(key_set=given_set), clock)
    assert caught.value.path.startswith("access.tokens.key_set")


@pytest.mark.parametrize(
    "unknown",
    [
        {"kty": "AKP", "alg": "ML-DSA-44", "kid": "new", "pub": "AA"},
        jwt.algorithms.ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP384R1()).public_key(), as_dict=True),
        public_jwk("RS256", alg="PS256", kid="pss"),
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
        {},
    ],
)
def test_keys_that_are_not_understood_are_left_out(
    clock: VirtualClock, unknown: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """An issuer that adds a key of another kind stops no rotation: the others are used, and the log names the one that is not."""
    settings = TokenSettings(key_set=key_set(public_jwk("EdDSA"), unknown))
    token = TokenIssuer(settings, clock, signing_key=private_jwk("EdDSA")).issue("alice")

    assert TokenVerifier(settings, clock).verify(token).subject == "alice"
    assert ["keys[1]" in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(SettingsError):
        TokenVerifier(TokenSettings(key_set=key_set(unknown)), clock)
    with pytest.raises(SettingsError):
        TokenIssuer(TokenSettings(), clock, signing_key=unknown)


@pytest.mark.parametrize("entry", [{}, {"alg": "Ed25519"}, {"alg": "EdDSA"}, {"kid": "a"}])
@pytest.mark.parametrize("name", ["Ed25519", "EdDSA"])
def test_both_names_of_an_ed25519_signature_are_taken(clock: VirtualClock, name: str, entry: dict[str, Any]) -> None:
    """RFC 9864 names the algorithm by its curve; other keys are not for it."""
    jws = jwt.PyJWS()
    jws.register_algorithm("Ed25519", jwt.algorithms.OKPAlgorithm())
    payload = json.dumps({"sub": "alice", "exp": now_s(clock) + 60}).encode()
    token = jws.encode(payload, ED_KEY, algorithm=name, headers={"kid": "a"} if "kid" in entry else None)

    verifier = TokenVerifier(TokenSettings(key_set=key_set(public_jwk("EdDSA", **entry))), clock)
    assert verifier.verify(token).subject == "alice"
    for other in ("ES256", "RS256"):
        with pytest.raises(TokenInvalid):
            TokenVerifier(TokenSettings(key_set=key_set(public_jwk(other, **entry | {"alg": other}))), clock).verify(
                token
            )


def test_keys_for_encryption_are_passed_over(clock: VirtualClock) -> None:
    """A key of the set that says it is not for signatures verifies none."""
    settings = TokenSettings(key_set=key_set(public_jwk("EdDSA", use="enc")))
    token = TokenIssuer(settings, clock, signing_key=private_jwk("EdDSA")).issue("alice")

    with pytest.raises(TokenInvalid):
        TokenVerifier(settings, clock).verify(token)


def test_nothing_is_signed_that_would_be_refused(clock: VirtualClock) -> None:
    """The issuer checks names as the verifier does, and needs a key that can sign."""
    with pytest.raises(TokenInvalid):
        TokenIssuer(HS256, clock).issue("")
    with pytest.raises(TokenInvalid):
        TokenIssuer(HS256, clock).issue("alice", claims=TokenClaims(partition_prefixes=("",)))
    with pytest.raises(SettingsError):
        TokenIssuer(TokenSettings(), clock)
    with pytest.raises(SettingsError):
        TokenIssuer(TokenSettings(), clock, signing_key=public_jwk("EdDSA"))


def test_the_unverified_view_of_nonsense_is_refused() -> None:
    """Looking at something that is no token says so."""
    for token in ("", "x", "e30.W10.e30"):
        with pytest.raises(TokenInvalid):
            read_unverified(token)
