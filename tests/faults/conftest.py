"""What several fault tests share."""

from collections.abc import Iterator

import pytest

from tests.s3servers import S3Server, weed_s3


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run one SeaweedFS for all tests that need an S3 server with keys and multipart uploads."""
    with weed_s3(tmp_path_factory.mktemp("weed")) as running:
        yield running
