"""How one model runs one batch.

Importing this package settles, before torch is loaded, how its threads wait for each other: asleep. All services of a
small machine share its cores, and a spinning thread takes its core from the very one it waits for; with the cores
overcommitted a step of many small products takes ten times as long. OMP_WAIT_POLICY in the environment overrides.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
