"""The list of packages; everything else about the distribution is in pyproject.toml.

`packages.find` of pyproject.toml cannot join several roots with packages whose folder has another name
(`recipes` is `quantkit.recipes`), and a list written by hand would forget the next subpackage.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(".", include=["quantkit", "quantkit.*"]),
        *find_packages("runtime", include=["quantkit_runtime", "quantkit_runtime.*"]),
        *find_packages("runtime", include=["quantkit_instruments", "quantkit_instruments.*"]),
        "quantkit.recipes",
        "quantkit.calibration_data",
    ]
)
