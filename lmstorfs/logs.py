"""Logging: one structured line an event, to standard error (a file, or journald)."""

import logging
import sys

import structlog


def configure(level: str) -> None:
    """Set logging up for a process of this package."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=number, stream=sys.stderr, format="%(levelname)s %(message)s")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
