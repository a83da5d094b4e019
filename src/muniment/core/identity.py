"""Keys that follow from what a caller named: one operation has one object, wherever it is applied."""

import base64
import hashlib
from typing import Final, Literal

from muniment.core import canonical

KEY_VERSION: Final = 1
KEY_CHARACTERS: Final = 26
LOCAL_ACCOUNT: Final = "local"

ObjectKind = Literal["memory", "stream", "step"]


def object_key(kind: ObjectKind, account_key: str, operation_id: str, ordinal: int = 0) -> str:
    """``kind:`` and 26 base32 characters of SHA-256(version, account, operation ID, ordinal) (ruling 17)."""
    named = canonical.encode([KEY_VERSION, account_key, operation_id, ordinal])
    text = base64.b32encode(hashlib.sha256(named).digest()).decode().lower()
    return f"{kind}:{text[:KEY_CHARACTERS]}"
