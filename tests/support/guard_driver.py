"""A guard over our fake supervisor: ``guard_driver.py --launch-fd N``. Its patience comes as JSON."""

import json
import os
import sys

from hayata_supervisor.guard import guard_main
from hayata_supervisor.process.supervised import Limits

if __name__ == "__main__":
    sys.exit(
        guard_main(
            sys.argv[1:],
            limits=Limits(**json.loads(os.environ["GUARD_RIG_LIMITS"])),
            supervisor_module="tests.support.guard_fake_supervisor",
        )
    )
