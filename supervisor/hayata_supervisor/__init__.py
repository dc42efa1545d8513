"""The runtime: the processes behind `hayata`. Nobody imports it but itself; users meet it as a program.

One file per process role: ``guard``, ``supervisor``, ``forkserver``, ``agent_worker``, ``node_worker``,
``edge_worker``. ``core`` is pure logic, ``store`` the only place that knows LMDB, ``process`` the only place that
spawns, signals, reaps and reads the clock.
"""
