# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Broken, lying and huge images are refused, in little time and memory, and nothing is fetched, opened or run."""

import base64
import gc
import io
import json
import os
import resource
import struct
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path

from marft_trl.episodes.images import ImageError, decode_image, read_image

import numpy as np
from PIL import Image, ImageDraw


ROOT = Path(__file__).parent.parent
MEMORY = 200 * 2**20  # of a kind, beyond what the process has before all of them
MOST = (8192, 4096)  # the largest image that is accepted
PNG, JPEG, GIF, BMP = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF89a", b"BM"
FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "urllib.", "ftplib.")


def saved(kind: str, size: tuple[int, int] = (64, 64), **options) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def animation(kind: str, frames: int) -> bytes:
    images = [Image.new("RGB", (8, 8), (i % 256, i // 256, 0)) for i in range(frames)]
    images[0].save(file := io.BytesIO(), kind, save_all=True, append_images=images[1:])
    return file.getvalue()


def zeros(megabytes: int) -> bytes:
    """Zlib's format of many zeros, made at once: the blocks of one megabyte, over and over."""
    packer = zlib.compressobj(9)
    first, block = (packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + block * (megabytes - 1)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PIXELS, END = chunk(b"IDAT", zlib.compress(bytes(52))), chunk(b"IEND")  # of 4 x 4


def png(*chunks: bytes, size: tuple[int, int] = (4, 4), color: int = 2) -> bytes:
    return PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, color, 0, 0, 0)) + b"".join(chunks)


def gif(before: bytes = b"", size: tuple[int, int] = (4, 4)) -> bytes:
    """A GIF with something before its only frame, of 1 x 1."""
    frame = b",\0\0\0\0\1\0\1\0\0\2\2\x44\1\0;"
    return GIF + struct.pack("<HHBBB", *size, 0x80, 0, 0) + bytes(6) + before + frame


def bmp(size: tuple[int, int], data: bytes, runs: int = 0) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, *size, 1, 8, runs, len(data), 0, 0, 0, 0)
    return BMP + struct.pack("<IHHI", 1078 + len(data), 0, 0, 1078) + header + bytes(1024) + data


def jpeg(*segments: tuple[int, bytes]) -> bytes:
    """A JPEG with segments before all others."""
    parts = (struct.pack(">BBH", 255, marker, len(data) + 2) + data for marker, data in segments)
    return JPEG + b"".join(parts) + saved("JPEG")[2:]


def scans(number: int) -> bytes:
    """A progressive JPEG with as many more scans, each of them of the whole of the largest image."""
    data = saved("JPEG", (64, 64), progressive=True)
    at, last = data.index(b"\xff\xc2") + 5, data.rindex(b"\xff\xda")
    data = data[:at] + struct.pack(">HH", *MOST[::-1]) + data[at + 4 :]
    return data[:-2] + data[last:-2] * number + data[-2:]


def tags(number: int, kind: int) -> bytes:
    """A directory of TIFF with that many tags, all of which have the same 64 KB."""
    entries = b"".join(struct.pack("<HHII", tag, kind, 65000, 0) for tag in range(number))
    return (b"II*\0\x08\0\0\0" + struct.pack("<H", number) + entries + bytes(4)).ljust(65500, b"\0")


def webp(size: tuple[int, int]) -> bytes:
    """An animated WebP whose canvas is larger than its only frame."""
    canvas = b"".join((side - 1).to_bytes(3, "little") for side in size)
    frame = bytes(6) + b"\7\0\0\7\0\0\1\0\0\0" + saved("WEBP", (8, 8), lossless=True)[12:]
    parts = {b"VP8X": b"\2\0\0\0" + canvas, b"ANIM": bytes(6), b"ANMF": frame}
    body = b"WEBP" + b"".join(name + struct.pack("<I", len(part)) + part for name, part in parts.items())
    return b"RIFF" + struct.pack("<I", len(body)) + body


def url(data: bytes | str, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def closed() -> Image.Image:
    image = Image.open(io.BytesIO(saved("PNG")))
    image.close()
    return image


def no_pixels() -> Image.Image:
    image = Image.Image()
    image._size, image._mode = (4, 4), "RGB"
    return image


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(ran) print showpage\n%%EOF\n"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"><image href="file:///etc/passwd"/></svg>'
ODD = base64.b64encode(saved("PNG")).decode()
# Files, each read from base64, from its bytes and from a path
FILES = {
    "no bytes": lambda: b"",
    "text": lambda: b"hello " * 9,
    "HTML": lambda: b"<html><img src=http://localhost/></html>",
    "SVG": lambda: SVG.encode(),
    "zip": lambda: b"PK\3\4" + bytes(64),
    "noise": lambda: np.random.default_rng(0).bytes(2**20),
    "EPS, which a program would draw": lambda: EPS,
    "PDF": lambda: b"%PDF-1.4\n1 0 obj<<>>endobj\ntrailer<<>>\n%%EOF",
    "PSD": lambda: b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 8, 8, 8, 3) + bytes(300),
    **{kind: lambda kind=kind: saved(kind) for kind in ("ICO", "TIFF", "TGA", "PPM", "JPEG2000", "DDS", "ICNS")},
    **{f"half of {kind}": lambda kind=kind: half(saved(kind)) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")},
    **{f"the start of {start[:4]!r}": lambda start=start: start for start in (PNG, JPEG + b"\xff", GIF, BMP, b"RIFF")},
    "PNG with a wrong checksum": lambda: saved("PNG").replace(b"IDAT", b"IDAT\x55", 1),
    "PNG with a wrong checksum of its header": lambda: PNG + chunk(b"IHDR", bytes(13))[:-1] + b"!" + PIXELS + END,
    "PNG of 60,000 x 60,000": lambda: png(PIXELS, END, size=(60000, 60000)),
    "PNG of 2^31 x 2^31": lambda: png(PIXELS, END, size=(2**31 - 1, 2**31 - 1)),
    "PNG a little too large": lambda: png(PIXELS, END, size=(MOST[0], MOST[1] + 1)),
    "PNG of the largest size without pixels": lambda: png(PIXELS, END, size=MOST, color=6),
    "PNG without pixels": lambda: png(END),
    "PNG of 0 x 4": lambda: png(PIXELS, END, size=(0, 4)),
    "PNG with a chunk that never ends": lambda: png(struct.pack(">I", 2**31 - 1) + b"IDAT" + bytes(99)),
    **{
        f"PNG with a {name.decode()} of a gigabyte": lambda name=name: png(
            chunk(name, b"a\0\0" + zeros(1024)), PIXELS, END
        )
        for name in (b"zTXt", b"iCCP")
    },
    "PNG with texts of four bytes a letter": lambda: png(
        *[chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress("\U0001f600".encode() + bytes(2**20 - 9), 1))] * 60,
        PIXELS,
        END,
    ),
    "PNG with a million chunks before": lambda: png(chunk(b"aaAa") * 2**20, PIXELS, END),
    "PNG with a million chunks after": lambda: png(PIXELS, chunk(b"aaAa") * 2**20, END),
    "PNG with a million parts of pixels": lambda: png(chunk(b"IDAT") * 2**20, PIXELS, END),
    "GIF of 65,535 x 65,535": lambda: gif(size=(65535, 65535)),
    "GIF of 0 x 0 with a frame of 0 x 0": lambda: GIF + bytes(7) + b"," + bytes(9) + b"\2\0;",
    "GIF with a comment in 40,000 parts": lambda: gif(b"!\xfe" + (b"\xff" + b"a" * 255) * 40000 + b"\0"),
    "GIF with 300,000 comments": lambda: gif(b"!\xfe\x08aaaaaaaa\0" * 300_000),
    "GIF with junk before its frame": lambda: gif(b"a" * 2**22),
    "JPEG with hundreds of scans": lambda: scans(400),
    "JPEG with a million segments": lambda: jpeg(*[(0xE5, b"")] * 2**20),
    "JPEG with junk before its frame": lambda: JPEG + b"\xff" * 2**22 + saved("JPEG")[2:],
    "WebP of 16,383 x 16,383": lambda: webp((16383, 16383)),
    "WebP of 2^24 x 2^24": lambda: webp((2**24, 2**24)),
    "BMP of less than nothing": lambda: bmp((-5, -5), bytes(99)),
    "BMP of 2^31 x 2^31": lambda: bmp((2**31 - 1, -(2**31)), bytes(99)),
    "BMP that skips 255 rows of 16 million": lambda: bmp((2**24, 2), b"\0\2\0\xff", 1),
    "BMP that ends a row of 16 million": lambda: bmp((2**24, 2), b"\1\0\0\0\1\0\0\0\0\1", 1),
    "BMP of a million runs": lambda: bmp(MOST, b"\1\0" * 2**20, 1),
    "too many bytes": lambda: bytes(2**25 + 1),
}
# What a client sends in place of base64
SENT = {
    "nothing": lambda: None,
    "a number": lambda: 3,
    "bytes": lambda: saved("PNG"),
    "a list": lambda: [ODD],
    "a dict": lambda: {"url": ODD},
    "an empty string": lambda: "",
    "not ASCII": lambda: "ä" + ODD,
    "half of a character": lambda: "\ud800" + ODD,
    "letters that are not base64": lambda: "*" + ODD,
    "no padding": lambda: ODD + "a",
    "NUL": lambda: ODD + "\0",
    "a data URL of text": lambda: url("a", "data:text/html;base64,"),
    "a data URL without a type": lambda: "data:;base64," + ODD,
    "a data URL without base64": lambda: "data:image/png," + ODD,
    "a data URL without a comma": lambda: "data:image/png;base64" + ODD,
    "a data URL of SVG": lambda: url(SVG, "data:image/svg+xml;base64,"),
    "a data URL of SVG as text": lambda: "data:image/svg+xml;utf8," + SVG,
    "a data URL with percents": lambda: "data:image/png;base64," + ODD.replace("=", "%3D").replace("/", "%2F") + "%0A",
    "a data URL in a data URL": lambda: url(ODD, "data:image/png;base64,data:image/png;base64,"),
    "a data URL in the base64 of a data URL": lambda: url(url(saved("PNG"))),
    "base64 in base64": lambda: url(ODD),
    "too many letters": lambda: "A" * (4 * 2**25 // 3 + 9),
    **{
        f"{scheme} URL": lambda s=scheme: f"{s}://127.0.0.1:9/etc/a.png" for scheme in ("http", "https", "file", "ftp")
    },
    "the path of an image": lambda: "imag/png",  # which is base64, too
    "the whole path of an image": lambda: os.path.abspath("imag/png"),
}


class BytePath:
    def __fspath__(self) -> bytes:
        return b"missing.png"


# Other objects that data sets, environments and tools have
READ = {
    "nothing": lambda: None,
    "a number": lambda: 3,
    "an array": lambda: np.zeros((4, 4, 3), np.uint8),
    "an empty dict": lambda: {},
    "a dict with nothing": lambda: {"bytes": None, "path": None},
    "a dict in a dict": lambda: {"bytes": {"bytes": saved("PNG")}},
    "no path": lambda: "",
    "a missing path": lambda: "missing.png",
    "a missing path of bytes": BytePath,
    "a path with NUL": lambda: "imag/png\0.png",
    "a path with half of a character": lambda: "\ud800.png",
    "a long path": lambda: "a" * 10**6,
    "a folder": lambda: "imag",
    "a data URL": lambda: url(saved("PNG")),
    **{
        f"{scheme} URL": lambda s=scheme: f"{s}://127.0.0.1:9/etc/a.png" for scheme in ("http", "https", "file", "ftp")
    },
    **{
        name: lambda name=name: {"path": name}
        for name in ("/dev/zero", "/proc/self/pagemap", "fifo", "link", "sparse")
    },
    "an image without pixels": no_pixels,
    "an image of 0 x 0": lambda: Image.new("RGB", (0, 0)),
    "an image that is closed": closed,
    "a lazy image that is broken": lambda: Image.open(io.BytesIO(half(saved("PNG")))),
    "a lazy image that is too large": lambda: Image.open(io.BytesIO(png(PIXELS, END, size=(8192, 8192)))),
    "a lazy EPS, which a program would draw": lambda: Image.open(io.BytesIO(EPS)),
    "another object of Pillow": Image.Exif,
}
# Files that are odd and still images, if little of them is read
FINE = {
    "GIF of 3,000 frames": lambda: animation("GIF", 3000),
    "WebP of 500 frames": lambda: animation("WEBP", 500),
    "PNG with a gigabyte of pixels that are not in it": lambda: png(chunk(b"IDAT", zeros(1024)), END),
    "JPEG with 100,000 letters of Exif": lambda: jpeg(*[(0xE1, b"Exif\0\0" + b"a" * 60)] * 1600),
    "JPEG whose Exif has 64 KB over and over": lambda: jpeg((0xE1, b"Exif\0\0" + tags(5000, 7))),
    "JPEG whose list of images has 64 KB over and over": lambda: jpeg((0xE2, b"MPF\0" + tags(5000, 6))),
    "JPEG with resources of Photoshop": lambda: jpeg(
        *[(0xED, b"Photoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0" * 5000)] * 50
    ),
}


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def memory(name: str) -> int:
    """`VmSize`, the address space, or `VmHWM`, the most that was in use since `main` asked to forget."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def main(folder: str) -> None:
    """Try every kind under limits, and print what became of each."""
    os.chdir(folder)
    os.mkdir("imag")
    Path("imag/png").write_bytes(saved("PNG"))
    os.mkfifo("fifo")
    os.symlink("/dev/zero", "link")
    Path("sparse").touch()
    os.truncate("sparse", 2**40)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):  # imports, so that later none opens a file
        decode_image(url(saved(kind)))
    Image.init()
    warnings.simplefilter("ignore")  # Pillow warns of odd files
    reached: list[str] = []  # what no image may cause

    def watch(event: str, arguments: tuple) -> None:
        if event.startswith(FORBIDDEN) or (event == "open" and watched):
            reached.append(f"{event}{arguments}"[:200])
            raise OSError("An image reached for something.")

    watched = False
    sys.addaudithook(watch)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    def attempt(name: str, function, value, opens: bool = False) -> None:
        nonlocal watched
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        reached.clear()
        before, started, watched = memory("VmHWM"), time.process_time(), not opens
        try:
            outcome = str(function(value).size)
        except ImageError as error:
            outcome = f"ImageError: {error}"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        watched, spent = False, time.process_time() - started
        grown = (memory("VmHWM") - before) / 2**20
        print(json.dumps([name, outcome[:200], list(reached), round(spent, 2), round(grown)]), flush=True)

    for name, make in (FILES | FINE).items():
        data = make()
        attempt(f"{name}, bytes", read_image, data)
        if len(data) <= 2**24:  # the letters and their copies have their own test of length
            attempt(f"{name}, base64", decode_image, url(data))
        Path("renamed.png").write_bytes(data)
        attempt(f"{name}, path", read_image, "renamed.png", opens=True)
        del data
    for name, make in SENT.items():
        attempt(f"sent {name}", decode_image, make())
    for name, make in READ.items():
        attempt(f"read {name}", read_image, make(), opens=True)


def test_hostile_images_are_refused_in_little_time_and_memory(tmp_path):
    command = [sys.executable, "-m", "tests.test_hostile_images", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (results[-1:], done.stderr[-2000:])  # the last kind before one that ended the process
    assert len(results) > 2 * len(FILES) + len(FINE) + len(SENT) + len(READ)
    fine = tuple(FINE)
    for name, outcome, reached, spent, grown in results:
        expected = "(" if name.startswith(fine) else "ImageError: "
        assert outcome.startswith(expected) and "MemoryError" not in outcome, (name, outcome)
        assert not reached, (name, reached)
        assert spent < 5 and grown < MEMORY / 2**20, (name, spent, grown)


def test_images_that_are_read_have_no_metadata_and_no_file():
    for data in (animation("GIF", 3), animation("WEBP", 3), jpeg((0xE1, b"Exif\0\0" + tags(9, 7)))):
        image = read_image(data)
        assert type(image) is Image.Image and not image.info and not dict(image.getexif())
        assert read_image(data) is image is decode_image(url(data))


def test_an_image_that_is_drawn_on_later_stays_as_it_was_read():
    canvas = Image.new("RGB", (8, 8))
    first = read_image(canvas)
    ImageDraw.Draw(canvas).point((0, 0), (255, 0, 0))
    second = read_image(canvas)
    assert first.getpixel((0, 0)) == (0, 0, 0) and second.getpixel((0, 0)) == (255, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1])
