"""Make the example's data: pictures with one to three white squares, and how many there are. Train and test apart.

python examples/vision/make_data.py [FOLDER]
python examples/vision/make_data.py --episodes build/vision/episodes    for counting.yaml, whose environment draws
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

SIDE, SQUARE = 32, 8
MOST = 3


def picture(rng: random.Random, count: int) -> Image.Image:
    """Draws `count` white squares on black, each in its own cell."""
    cells = [(x, y) for x in range(0, SIDE, SQUARE) for y in range(0, SIDE, SQUARE)]
    image = Image.new("RGB", (SIDE, SIDE))
    for x, y in rng.sample(cells, count):
        ImageDraw.Draw(image).rectangle((x + 1, y + 1, x + SQUARE - 2, y + SQUARE - 2), fill="white")
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="build/vision/data", type=Path)
    parser.add_argument("--episodes", action="store_true", help="two numbers a row, without pictures")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures, or of the numbers")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    if args.episodes:
        args.folder.mkdir(parents=True, exist_ok=True)
        counts = [[rng.randint(1, MOST), rng.randint(1, MOST)] for _ in range(384)]
        rows = [{"question": "how many?", "counts": of_both} for of_both in counts]
        (args.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.folder / 'train.jsonl'}: {len(rows)} episodes")
        return
    for split, number in (("train", 384), ("test", 48)):
        (args.folder / split).mkdir(parents=True, exist_ok=True)
        rows = []
        for index in range(number):
            count, file = 1 + index % MOST, f"{split}/{index}.png"
            picture(rng, count).save(args.folder / file)
            rows.append({"question": "how many?", "image": file, "answer": str(count)})
        (args.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.folder / split}.jsonl: {number} pictures")


if __name__ == "__main__":
    main()
