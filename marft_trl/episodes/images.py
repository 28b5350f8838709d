# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Images in messages: how they are read, their limits, and contents that have parts of text and images."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import itertools
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 2**25  # of an image, checked before it is decoded
_MAX_BYTES = 2**25  # of a file
_MAX_READS = 2**14  # of a file, whose pieces Pillow reads in loops of Python
# Scans of a progressive JPEG, each a pass over all pixels, and texts of a PNG, each of up to 4 MB
_MAX_MARKS = 32
_MARKS = {b"\xff\xd8": b"\xff\xda", b"\x89P": b"iTXt"}
# Segments of a JPEG that Pillow parses into more memory and time than they have bytes
_METADATA = re.compile(rb"\xff[\xe1\xe2\xed](?=..(?:Exif\0|MPF\0|Photoshop))", re.DOTALL)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # other decoders of Pillow run programs, or have no limits
# The tag of the orientation in the Exif segment of a JPEG, and the methods of Pillow's `transpose` by its value
_ORIENTATION = re.compile(
    rb"\xff\xe1..Exif\0\0(?:II\*\0\x08\0\0\0..(?:.{12}){0,64}?\x12\x01\x03\0\x01\0\0\0(.)"
    rb"|MM\0\*\0\0\0\x08..(?:.{12}){0,64}?\x01\x12\0\x03\0\0\0\x01\0(.))",
    re.DOTALL,
)
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
# Images in use, by their content, so that rows and checkpoints have each of them once
_known: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


Messages = list[dict[str, Any]]


class ImageError(ValueError):
    """An image that cannot be read, or that no agent sees."""

    is_too_long = False  # as other errors of prompts


class _Pieces(io.BytesIO):
    """A file that is read in a limited number of pieces."""

    left = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ImageError(f"An image has more than about {_MAX_READS:,} pieces. Save it again.")
        return super().read(size)


def is_image(value: Any) -> bool:
    """`True` for an image of Pillow. Teams without images do not import Pillow."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def may_have_images(value: Any) -> bool:
    """`True` for an image, parts with an image, and a list with an image."""
    return is_image(value) or has_image(value) or (isinstance(value, (list, tuple)) and any(map(is_image, value)))


def as_json(value: Any) -> str:
    """`default` of `json.dumps`: equal images have equal texts."""
    return digest_of(value) if is_image(value) else str(value)


def read_image(source: Any, most: int = MAX_PIXELS) -> Image:
    """
    Read the first frame of an image of Pillow, the bytes or the path of a file, or `{"bytes": ..., "path": ...}` as
    `datasets` has images that are not decoded, of at most `most` pixels. Equal images are the same object:
    copy an image before you draw on it. Files are turned upright.

    Raises:
        ImageError: The image is missing, remote, broken or too large.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ImageError("Reading images needs Pillow. Install it with `pip install pillow`.")
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, (str, os.PathLike)):
        source = _read_file(os.path.expanduser(os.fsdecode(source)))
    if source is None or not (is_image(source) or isinstance(source, bytes)):
        raise ImageError(
            f"An image is missing: got {type(source).__name__}, but an image is a `PIL.Image.Image`, the bytes of a "
            "file, or the path of a local one. Convert an array with `PIL.Image.fromarray(array)`."
        )
    if (digest := str(getattr(source, "marft_digest", ""))) in _known:
        return _known[digest]
    try:
        image, turn = (source, None) if is_image(source) else _open(source)
        if not 0 < image.width * image.height <= most:
            size = f"{image.width:,} x {image.height:,}"
            raise ImageError(f"An image has {size} pixels, and at most {most:,} are read. Resize it.")
        if getattr(image, "tile", None) and image.format not in (*_FORMATS, "MPO"):
            raise ImageError(f"An image is a {image.format}, not one of {', '.join(_FORMATS)}. Load it first.")
        if any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ())):  # a loop of Python without limits
            raise ImageError("An image is a BMP with run lengths. Save it as a PNG.")
        image.load()
        if turn is not None:
            image = image.transpose(turn)  # type: ignore[arg-type]
        # A copy has no file and no metadata, and nobody draws on it. The colors of "P" are not in its pixels
        to = "RGBA" if "transparency" in image.info else "RGB"
        image = image.convert(to) if image.mode == "P" else image.copy()
        image.info = {}
        digest = digest_of(image)
    except ImageError:
        raise
    except Exception as error:  # damaged files raise any error
        raise ImageError(f"An image cannot be decoded ({type(error).__name__}: {str(error)[:120]}).") from error
    image = _known.setdefault(digest, image)
    image.marft_digest = digest
    return image


def digest_of(image: Any) -> str:
    """SHA-256 of the mode, the size and the pixels. Also stands for an image in JSON."""
    digest = hashlib.sha256(f"{image.mode}{image.size}".encode())
    for top in range(0, image.height, 256):  # a copy of all pixels would take several times their memory
        digest.update(image.crop((0, top, image.width, min(top + 256, image.height))).tobytes())
    return digest.hexdigest()


def restore_image(kind: Sequence[Any], pixels: Any) -> Image:
    """An image from its mode, width and height, and a tensor of its bytes."""
    from PIL import Image

    return read_image(Image.frombytes(kind[0], tuple(kind[1:]), pixels.numpy().tobytes()))


def _read_file(path: str) -> bytes:
    if "://" in path[:16] or path.startswith("data:"):
        raise ImageError(f"The image {path[:80]!r} is not a local file. Images are never fetched: load it first.")
    try:
        if not os.path.isfile(path):
            raise ImageError(f"The image {path[:200]!r} is not a file.")
        if os.path.getsize(path) > _MAX_BYTES:
            raise ImageError(f"The image {path[:200]!r} has more than {_MAX_BYTES:,} bytes. Resize it.")
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES + 1)  # files of the system have no size, and some have no end
    except ImageError:
        raise
    except (OSError, ValueError) as error:
        raise ImageError(f"The image {path[:200]!r} cannot be read: {error}.") from error


def _open(data: bytes) -> tuple[Image, int | None]:
    """An image that is not decoded yet, and the method of `transpose` that turns it upright."""
    from PIL import Image

    if len(data) > _MAX_BYTES:
        raise ImageError(f"An image has {len(data):,} bytes, and at most {_MAX_BYTES:,} bytes are read. Resize it.")
    if (mark := _MARKS.get(data[:2])) and data.count(mark) > _MAX_MARKS:
        raise ImageError(f"An image has more than {_MAX_MARKS} scans or texts. Save it as a baseline JPEG.")
    turn = None
    if data[:2] == b"\xff\xd8":
        orientation = _ORIENTATION.search(data, 0, 2**16)
        turn = _TURNS.get(max(orientation[1] or b"", orientation[2] or b"")[0]) if orientation else None
        data = _METADATA.sub(b"\xff\xeb", data)
    try:
        return Image.open(_Pieces(data), formats=_FORMATS), turn
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"An image is broken, or is not one of {', '.join(_FORMATS)}.") from error


def decode_image(data: str, most: int = MAX_PIXELS) -> Image:
    """Read an image in base64, maybe as a `data:` URL, as clients send it. Nothing else is read or fetched."""
    if not isinstance(data, str):
        raise ImageError(f"An image must be sent as text in base64, not as {type(data).__name__}.")
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            raise ImageError("An image must be sent as `data:image/...;base64,...`.")
    elif "://" in data[:16]:
        raise ImageError("Remote images are never fetched. Send the image as `data:image/...;base64,...`.")
    if len(data) > 4 * _MAX_BYTES // 3 + 4:
        raise ImageError(f"An image has more than {_MAX_BYTES:,} bytes. Resize it.")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ImageError("An image is not valid base64.") from error
    return read_image(content, most)


def as_data_url(image: Image, longest: int) -> str:
    """A small copy of an image, with at most `longest` pixels a side, as a `data:` URL for HTML pages."""
    small, file = image.convert("RGB"), io.BytesIO()
    small.thumbnail((longest, longest))
    small.save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


# ---- Contents with parts, `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}` ----


def is_parts(content: Any) -> bool:
    """`True` for a content of parts, and not for other lists, such as results of tools."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(part, Mapping) and part.get("type") in ("text", "image") for part in content)
    )


def has_image(content: Any) -> bool:
    return is_parts(content) and any(part["type"] == "image" for part in content)


def images_of(messages: Any) -> tuple[Any, ...]:
    """The images of messages, in order."""
    if isinstance(messages, str):
        return ()
    contents = [message.get("content") for message in messages]
    return tuple(
        part.get("image") for content in contents if is_parts(content) for part in content if part["type"] == "image"
    )


def text_of(content: Any) -> str:
    """The text of a content without its images, with a line break where an image was between two texts."""
    if not is_parts(content):
        return content or ""
    groups = itertools.groupby(content, lambda part: part["type"])
    return "\n".join("".join(part["text"] for part in group) for kind, group in groups if kind == "text")


def as_parts(content: Any) -> list[dict[str, Any]]:
    return list(content) if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def with_images(text: str, images: Sequence[Any]) -> Any:
    """The content of a message with images, which come first as in TRL; the text alone without any."""
    places = [{"type": "image", "image": image} for image in images]
    return [*places, *(as_parts(text) if text else ())] if images else text


def split_parts(content: Any) -> tuple[str, tuple[Any, ...]]:
    """The text and the images that an environment or a tool returned as parts, or as an image."""
    parts: list[Any] = [content] if is_image(content) else content
    parts = [{"type": "image", "image": part} if is_image(part) else part for part in parts]
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    parts = [_read_part(part, "what an environment or a tool returned") for part in parts]
    return text_of(parts), images_of([{"content": parts}])


def _read_part(part: Any, where: str, needs_image: bool = True) -> dict[str, Any]:
    part = {key: entry for key, entry in part.items() if entry is not None} if isinstance(part, Mapping) else {}
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image" and (needs_image or "image" in part):
        return {"type": "image", "image": read_image(part.get("image"))}
    if kind == "image":
        return {"type": "image"}
    raise ImageError(
        f"A part of {where} has the type {str(kind)[:40]!r}. Parts are `{{'type': 'text', 'text': ...}}` and "
        "`{'type': 'image', 'image': ...}`; videos and URLs are not read."
    )


def read_prompt(row: Mapping[str, Any], sees_images: bool = True) -> str | Messages:
    """
    The prompt of a dataset row with its images in the messages, as `GRPOTrainer` (TRL 1.16) reads the columns `image`
    and `images` and contents with parts.

    Raises:
        ImageError: An image cannot be read, their number is not that of the places in the prompt, or no agent sees
            images.
    """
    if not sees_images:
        if images_of(row["prompt"]) or any(may_have_images(row.get(name)) for name in ("image", "images")):
            raise ImageError("The prompt has an image, but no agent of the team sees images.")
        return row["prompt"]
    from trl.data_utils import prepare_multimodal_messages

    prompt, where = row["prompt"], "the prompt"
    column = "images" if row.get("images") is not None else "image"
    sources: Any = row.get(column)
    is_single = column == "image" or is_image(sources) or isinstance(sources, (str, bytes, os.PathLike, Mapping))
    sources = (sources,) if sources is not None and is_single else sources
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        images = [read_image(source) for source in sources or ()]
    except ImageError as error:
        raise ImageError(f"`{column}`: {error}") from error
    messages = [
        {**message, "content": [_read_part(part, where, needs_image=False) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    if not images and not any(isinstance(message.get("content"), list) for message in messages):
        return prompt
    try:
        return prepare_multimodal_messages(messages, images)
    except ValueError as error:
        raise ImageError(f"`{column if column in row else 'prompt'}`: {error}") from error
