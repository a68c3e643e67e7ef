"""Settings of S3, found once for the data's client and the manifest's: endpoint, region, keys.

They come from where every AWS tool looks (botocore finds them): the environment, `~/.aws/config`
and `~/.aws/credentials` with AWS_PROFILE, SSO, assumed roles, web identity, containers' and
instances' roles. Keys that expire are fetched again. Nothing of this is written anywhere.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from os import environ
from typing import Any
from urllib.parse import urlsplit

from hslake.errors import InvalidInput, Unavailable, without_secrets

TIMEOUT = "HSLAKE_S3_TIMEOUT"  # seconds without any answer until a request counts as lost
RETRY = "HSLAKE_S3_RETRY"  # seconds for which a request is tried again
_CONNECT_S = 10.0
# The clients go down in a panic over anything else in a URL or a header.
_REGION = re.compile(r"[A-Za-z0-9._-]+")
_HEADER = re.compile(r"[!-~]+")
# The client asks again five minutes before this; botocore hands out none that ends sooner.
_KEYS_LAST = timedelta(minutes=10)


@dataclass(frozen=True)
class Keys:
    """Credentials as they are now. Never printed."""

    access: str
    secret: str = field(repr=False)
    token: str | None = field(repr=False, default=None)


@dataclass(frozen=True)
class Settings:
    """Where S3 is and how patient to be. `keys()` gives what is valid now; None: unsigned."""

    endpoint: str | None
    region: str
    virtual_host: bool
    keys: Callable[[], Keys] | None = field(repr=False)
    timeout_s: float
    retry_s: float
    retries: int

    @property
    def insecure(self) -> bool:
        """Whether the endpoint is plain HTTP."""
        return (self.endpoint or "").startswith("http://")


def find_settings() -> Settings:
    """Raises InvalidInput for settings that make no sense, Unavailable when there are no keys."""
    try:
        import botocore.session
        from botocore.configprovider import ConfiguredEndpointProvider
        from botocore.credentials import Credentials
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise InvalidInput(f"{error}: S3 needs pip install 'hslake[s3]'") from None
    try:
        session = botocore.session.Session()
        scoped: Mapping[str, Any] = session.get_scoped_config()
        endpoint = ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=scoped, client_name="s3"
        ).provide()
        region = (
            environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        )  # the region that all S3 look-alikes take
        unsigned = environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
        found = None if unsigned else session.get_credentials()
    except BotoCoreError as error:
        text = without_secrets(str(error))
        raise InvalidInput(f"the settings of AWS do not read: {text}: mend them") from None
    if found is None and not unsigned:
        raise Unavailable(
            "the store cannot be reached or refuses (NoCredentials: no AWS keys were found): "
            "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket "
            "AWS_SKIP_SIGNATURE=true"
        )
    if not _REGION.fullmatch(region):
        raise InvalidInput(
            f"the settings of AWS do not read: region {region!r}, expected one such as us-east-1: "
            "mend AWS_REGION, AWS_DEFAULT_REGION, or region of the profile"
        )
    if type(found) is Credentials:  # others are fetched when they are needed, and looked at then
        _frozen(found)
    style = scoped.get("s3")
    return Settings(
        endpoint=_endpoint(endpoint) if endpoint else None,
        region=region,
        virtual_host=isinstance(style, dict) and style.get("addressing_style") == "virtual",
        keys=None if found is None else lambda: _frozen(found),
        timeout_s=_number(TIMEOUT, 60),
        retry_s=_number(RETRY, 180),
        retries=max(0, int(_number("AWS_MAX_ATTEMPTS", 10)) - 1),
    )


def _endpoint(url: str) -> str:
    """The address as the clients take it. Raises InvalidInput, without what may be a password."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:  # a port that is none, half of an IPv6 address
        scheme, host, port = "", None, None
    sound = scheme in ("http", "https") and host and port != 0 and _HEADER.fullmatch(url)
    if not sound or "@" in url:
        shown = "one with an '@'" if "@" in url else repr(url)
        raise InvalidInput(
            f"the settings of AWS do not read: endpoint: found {shown}, expected an address such "
            "as http://127.0.0.1:9000 or https://s3.example.com, without keys: mend "
            "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or endpoint_url of the profile"
        )
    return (scheme + url[len(scheme) :]).rstrip("/")


def _frozen(found: Any) -> Keys:
    keys = found.get_frozen_credentials()
    for name, value in (("key id", keys.access_key), ("session token", keys.token)):
        if value and not _HEADER.fullmatch(value):
            raise InvalidInput(
                f"the settings of AWS do not read: the {name} holds white space, a line's end or "
                "a character that no key has: mend it where it comes from, the environment or the "
                "profile"
            )
    return Keys(keys.access_key, keys.secret_key, keys.token)


def _number(name: str, usual: float) -> float:
    text = environ.get(name, "")
    try:
        value = float(text or usual)
    except ValueError:
        value = 0
    if not 0 < value < 1e6:
        raise InvalidInput(f"{name}: found {text!r}, expected a number above 0")
    return value


def obstore_options(settings: Settings, bucket: str) -> dict[str, Any]:
    """Arguments of obstore's S3Store."""
    config: dict[str, Any] = {"region": settings.region, "conditional_put": "etag"}
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
    if settings.virtual_host:
        config["virtual_hosted_style_request"] = True
        if settings.endpoint:  # the client puts the bucket before AWS's own hosts only
            scheme, _, host = settings.endpoint.partition("://")
            config["endpoint"] = f"{scheme}://{bucket}.{host}"
    options: dict[str, Any] = {
        "config": config,
        "client_options": {
            "allow_http": settings.insecure,
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, settings.timeout_s)),
            "read_timeout": timedelta(seconds=settings.timeout_s),
            # Of a whole request: its body may be 64 MB, and the line slow.
            "timeout": timedelta(seconds=10 * settings.timeout_s),
        },
        "retry_config": {
            "max_retries": settings.retries,
            "retry_timeout": timedelta(seconds=settings.retry_s),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "base": 2}
            | {"max_backoff": timedelta(seconds=min(15.0, settings.retry_s / 4))},
        },
    }
    keys = settings.keys
    if keys is None:
        config["skip_signature"] = True
        return options

    def provide() -> dict[str, Any]:
        now = keys()
        return {
            "access_key_id": now.access,
            "secret_access_key": now.secret,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _KEYS_LAST,
        }

    return {**options, "credential_provider": provide}


def delta_options(settings: Settings, bucket: str) -> dict[str, str]:
    """The same for deltalake."""
    config = obstore_options(settings, bucket)["config"]
    options = {f"aws_{k}": str(v).lower() if v is True else str(v) for k, v in config.items()}
    if settings.insecure:
        options["aws_allow_http"] = "true"
    if settings.keys is not None:
        keys = settings.keys()
        options |= {"aws_access_key_id": keys.access, "aws_secret_access_key": keys.secret}
        if keys.token:
            options["aws_session_token"] = keys.token
    return options | {
        "timeout": f"{settings.timeout_s:g}s",
        "connect_timeout": f"{min(_CONNECT_S, settings.timeout_s):g}s",
        "max_retries": str(settings.retries),
        "retry_timeout": f"{settings.retry_s:g}s",
    }
