"""TLS by settings: one context for the port, whose certificate can be renewed while the node runs."""

from __future__ import annotations

import ssl

from .errors import CertificateUnusable
from .settings import ServerSettings

__all__ = ["load_certificate", "tls_context"]


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """
    The port's TLS context; ``None`` where no certificate is set.

    Raises:
        CertificateUnusable: A file cannot be read, or the two do not fit.
    """
    if settings.tls_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """
    Use the certificate that the files hold now, for connections from now on.

    Raises:
        CertificateUnusable: A file cannot be read, or the two do not fit; the context keeps what it has.
    """
    cert, key = settings.tls_cert_file, settings.tls_key_file
    assert cert is not None
    assert key is not None
    try:
        # Tried apart first: a context that was given half of a pair would serve neither the old nor the new one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise CertificateUnusable(f"{cert}, {key}", error.reason or "is not a PEM certificate and its key") from error
    except OSError as error:
        raise CertificateUnusable(f"{cert}, {key}", error.strerror or str(error)) from error


def _no_password() -> str:
    """Without this an encrypted key would make the node ask at a terminal, and wait."""
    return ""
