"""Logs: structured, on stderr, so that stdout belongs to the command's answer."""

import logging
import sys
from typing import Any

import structlog

from muniment.config import Config


def configure(config: Config) -> None:
    """Set up structlog, and the standard library's loggers of our dependencies, once a process."""
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    console = config.log_format == "console" or (config.log_format == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(sort_keys=True)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=max(level, logging.WARNING), format="%(name)s: %(message)s")
