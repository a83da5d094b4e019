"""The OpenAPI document: the seed's contract with its schemas unchanged, and the routes that are ours."""

from importlib import resources


def openapi_bytes() -> bytes:
    """Return ``openapi.json`` as it is shipped in the package."""
    return resources.files(__package__).joinpath("openapi.json").read_bytes()
