"""The parts of `examples/demo.py`. `job` runs in Hayata's workers; everything else is the operator's side."""
