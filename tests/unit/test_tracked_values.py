"""Names and values that go to a tracker: legal, flat, and without secrets."""

import hashlib
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_tasks.tracked_values import flatten_params, legal_tags, mask_secrets, sanitize_name


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("loss/policy", "loss/policy"),
        ("pass@8", "pass_at_8"),
        ("gpu%", "gpupct"),
        ("a:b*c", "a_b_c"),
        ("/abs//path/../x/./", "abs/path/x"),
        ("", "unnamed"),
        ("..", "unnamed"),
    ],
)
def test_names_become_legal(name: str, legal: str) -> None:
    assert sanitize_name(name) == legal


def test_names_that_are_too_long_stay_apart() -> None:
    first, second = sanitize_name("x" * 300 + "1"), sanitize_name("x" * 300 + "2")
    assert len(first) == len(second) == 250
    assert first != second


@settings(deadline=None)
@given(st.text(max_size=400))
def test_any_text_becomes_a_name_that_mlflow_takes(text: str) -> None:
    from mlflow.utils.validation import path_not_unique, validate_param_and_metric_name

    name = sanitize_name(text)
    assert 0 < len(name) <= 250
    assert validate_param_and_metric_name(name)
    assert not path_not_unique(name)
    assert sanitize_name(name) == name


@pytest.mark.parametrize(
    ("key", "is_secret"),
    [
        *[(key, True) for key in ("password", "DB_PASSWD", "client_secret", "aws_access_key_id", "secret_access_key")],
        *[(key, True) for key in ("api_key", "hf_token", "token", "auth_token", "s3.credentials", "wandb.api_key")],
        *[
            (key, False)
            for key in ("tokenizer", "max_token_len", "num_tokens", "stop_token", "keys", "monkey", "author")
        ],
    ],
)
def test_secrets_are_known_by_their_key(key: str, is_secret: bool) -> None:
    assert (mask_secrets({key: "v"})[key] == "***") is is_secret


def test_secrets_are_masked_wherever_they_lie() -> None:
    config: dict[str, Any] = {
        "store": {"secret": {"nested": "v"}, "urls": ["s3://b/k", "https://me:pw@host/x?y"], "password": None},
        "headers": [{"authorization": "Bearer v"}],
    }
    assert mask_secrets(config) == {
        "store": {"secret": "***", "urls": ["s3://b/k", "https://***@host/x?y"], "password": None},
        "headers": [{"authorization": "***"}],
    }


def test_params_are_flat_and_short() -> None:
    flat = flatten_params(
        {"a": {"b": [1, 2], "c": [{"d": True}], "e": {}}, "f": None, "g": "x" * 6001, "h": "x" * 6000}
    )
    assert flat.pop("g").endswith(f"x... sha256:{hashlib.sha256(b'x' * 6001).hexdigest()}")
    assert flat == {"a.b": "[1, 2]", "a.c.0.d": "true", "a.e": "{}", "f": "null", "h": "x" * 6000}
    assert flatten_params({}) == {}


def test_tags_are_cut_and_masked() -> None:
    tags = legal_tags({"api_key": "v", "url": "http://a:b@c", "n": 3, "long@x": "y" * 9000})
    assert tags == {"api_key": "***", "url": "http://***@c", "n": "3", "long_at_x": "y" * 7500}
    assert all(re.fullmatch(r"[\w./ -]+", key) for key in tags)
