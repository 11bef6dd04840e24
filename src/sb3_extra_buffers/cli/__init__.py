"""The ``sb3-extra-buffers`` command: inspect, check, convert and benchmark saved buffers."""
