"""Make optical-flow data of flying stamps: photographed cut-outs that move over photographs, with exact flow, boxes and masks.

apt-get download tuxpaint-stamps-default mate-backgrounds lomiri-wallpapers-16.04     # no root needed; 223 MB
for package in *.deb; do dpkg -x $package packages; done

python examples/make_stamps.py packages --pack stamps            # stamps-train.npz (600 pairs, 50 MB) and stamps-val.npz
python examples/make_stamps.py packages --folder chairs          # a FlyingChairs folder with COCO annotations, 0.8 MB a pair
python examples/make_stamps.py packages --sources small          # what is used of the packages, shrunk to 15 MB
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from nofm.data.stamp_sets import write_folder, write_pack
from nofm.data.stamp_sources import copy_sources, find_sources
from nofm.data.stamps import make_pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="where the packages were unpacked, or a folder that --sources has written")
    parser.add_argument("--pack", type=Path, metavar="NAME", help="write NAME-train.npz and NAME-val.npz")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="write a FlyingChairs folder")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="write the stamps and photographs themselves, shrunk")
    parser.add_argument("--pairs", type=int, default=600, help="training pairs (default 600)")
    parser.add_argument("--val-pairs", type=int, default=64, help="pairs of held-out stamps over held-out photographs (default 64)")
    parser.add_argument("--size", type=int, nargs=2, default=(256, 320), metavar=("H", "W"), help="of frames (default 256 320)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other pairs (default 0)")
    parser.add_argument("--quality", type=int, default=95, help="of the JPEGs in a pack (default 95)")
    parser.add_argument("--workers", type=int, default=0, help="processes that render (default 0: this one)")
    args = parser.parse_args()
    if not (args.pack or args.folder or args.sources):
        parser.error("say what to write: --pack, --folder or --sources")

    began = time.perf_counter()
    if args.sources:
        copy_sources(args.root, args.sources)
        files = [path for path in args.sources.rglob("*") if path.is_file()]
        print(f"{args.sources}: {len(files)} pictures, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
    if args.pack or args.folder:
        parts = {}
        for part, count in (("train", args.pairs), ("val", args.val_pairs)):
            sources = find_sources(args.root, part)
            print(f"{part}: {sources.stamps} stamps of {len(set(sources.categories))} categories, {sources.photographs} photographs")
            parts[part] = lambda s=sources, n=count: make_pairs(s, n, *args.size, args.seed, workers=args.workers)
        if args.pack:
            for part, pairs in parts.items():
                path = args.pack.with_name(f"{args.pack.name}-{part}.npz")
                print(f"{path}: {write_pack(path, pairs(), args.quality) / 1e6:.1f} MB")
        if args.folder:
            write_folder(args.folder, parts["train"](), parts["val"]())
            print(f"{args.folder}: {args.pairs} + {args.val_pairs} pairs")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
