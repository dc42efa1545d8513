"""``hayata-supervisor`` whose guard has another patience: `Limits` as JSON in ``$CRASH_LIMITS``."""

import json
import os
import sys

from hayata_supervisor import main
from hayata_supervisor.guard import guard_main
from hayata_supervisor.process.supervised import Limits

if __name__ == "__main__":
    if sys.argv[1] == "--launch-fd":
        sys.exit(guard_main(sys.argv[1:], limits=Limits(**json.loads(os.environ["CRASH_LIMITS"]))))
    main.module_command = lambda module, arguments: [sys.executable, __file__, *arguments]
    main.main()
