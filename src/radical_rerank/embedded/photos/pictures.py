"""Freely licensed photographs to try the model on.

scikit-image's sample pictures are in the public domain. The stamps of Tux Paint (GPL-2, Debian's package
tuxpaint-stamps-default) are photographs of single things before a white ground.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from radical_rerank.errors import MissingExtraError

ASKED = {
    "a cat": "chelsea.png",
    "a cup of coffee": "coffee.png",
    "a rocket": "rocket.jpg",
    "a motorcycle": "motorcycle_left.png",
    "an astronaut in a space suit": "astronaut.png",
    "a man with a camera on a tripod": "camera.png",
    "old coins": "coins.png",
    "a clock": "clock_motion.png",
    "a brick wall": "brick.png",
    "grass": "grass.png",
    "gravel and stones": "gravel.png",
    "the moon": "moon.png",
}
"""plain words for the pictures, and the file that each means"""
OTHERS = ("hubble_deep_field.jpg",)
"""pictures that no query asks for"""

STAMPS = Path("/usr/share/tuxpaint/stamps")
"""where Debian's package puts them"""
CLASSES = {
    "airliner": "vehicles/flight/planes/747.png",
    "broccoli": "food/vegetables/broccoli.png",
    "flamingo": "animals/birds/pink_flamingo.png",
    "gorilla": "animals/mammals/apes/gorilla.png",
    "hippopotamus": "animals/mammals/hippopotamus.png",
    "iguana": "animals/lizards/iguana.png",
    "koala": "animals/marsupials/koala.png",
    "lionfish": "animals/fish/lionfish.png",
    "mailbox": "town/usps_mailbox.png",
    "ostrich": "animals/birds/ostrich.png",
    "owl": "animals/birds/owl.png",
    "peacock": "animals/birds/peacock.png",
    "pineapple": "food/fruit/pineapple.png",
    "pomegranate": "food/fruit/pomegranate.png",
    "stethoscope": "medical/stethoscope.png",
    "syringe": "medical/syringe.png",
    "teapot": "household/dishes/teapot.png",
}
"""names of ImageNet's classes that are in no caption of Flickr8k, and a stamp of each"""


def sample_pictures() -> list[Path]:
    """Return the files of the pictures, in the order of their names."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise MissingExtraError("scikit-image", "demo")
    folder = Path(spec.origin).parent / "data"
    return [folder / name for name in sorted({*ASKED.values(), *OTHERS})]
