"""The command ``sb3-extra-buffers``: look inside saved buffers, check, convert and measure them."""
