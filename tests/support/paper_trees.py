"""The datasets of the papers, tiny, in the true layouts and file formats of their authors."""

import json
import pickle
import struct
from functools import partial
from typing import NamedTuple

import numpy as np
from make_images import encoded, pixels, write_directory

from fedcache.extract.datasets import paper

SPLITS = {"train": 0, "test": 1, "val": 2}


class Row(NamedTuple):
    """One row as the reader should give it; ``image`` is the file's bytes or the pixels."""

    name: str
    label: int
    domain: str
    split: int
    image: bytes | np.ndarray


class Tree:
    """Writes images below a folder and remembers the rows they should become."""

    def __init__(self, root):
        self.root = root
        self.rows = []
        self._seed = 0

    def image(self, path, kind="JPEG"):
        self._seed += 1
        raw = encoded(pixels(self._seed, 8), kind)
        write_directory(self.root, {path: raw})
        return raw

    def row(self, name, label, split, image, domain="all"):
        self.rows.append(Row(name, label, domain, SPLITS[split], image))

    def add(self, path, label, split, *, below="", name=None, domain="all", kind="JPEG"):
        """Write an image, and note its row, which is named like its path in the folder ``below``."""
        self.row(name or path, label, split, self.image(below + path, kind), domain)

    def lines(self, path, lines, end="\n"):
        """Write a text of these lines."""
        write_directory(self.root, {path: "".join(line + end for line in lines).encode()})


def python2(value):
    """A pickle as Python 2 wrote CIFAR's batches: byte strings for texts, and for the bytes of an array."""

    def text(raw):
        return (
            b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<i", len(raw))
        ) + raw

    def put(held):
        match held:
            case str():
                return text(held.encode())
            case int():
                return b"J" + struct.pack("<i", held)
            case list():
                return b"](" + b"".join(map(put, held)) + b"e"
            case dict():
                return b"}(" + b"".join(put(k) + put(v) for k, v in held.items()) + b"u"
            case np.ndarray():
                made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
                kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
                shape = b"(" + b"".join(map(put, held.shape)) + b"t"
                return made + b"(K\x01" + shape + kind + b"\x89" + text(held.tobytes()) + b"tb"
        raise TypeError(held)

    return b"\x80\x02" + put(value) + b"."


def _cifar(tree, folder, files, key, classes):
    for split, names in files.items():
        place = 0
        for name in names:
            images = np.stack([pixels(tree._seed + i, 32, 32) for i in range(4)])
            tree._seed += 4
            labels = [(place + i) % classes for i in range(4)]
            flat = images.transpose(0, 3, 1, 2).reshape(4, -1)
            write_directory(
                tree.root / folder,
                {name: python2({"batch_label": name, key: labels, "data": flat})},
            )
            for image, label in zip(images, labels, strict=True):
                tree.row(f"{split}/{place:05d}", label, split, image)
                place += 1


def cifar10(tree):
    files = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    _cifar(tree, "cifar-10-batches-py", files, "labels", 10)


def cifar100(tree):
    _cifar(tree, "cifar-100-python", {"train": ["train"], "test": ["test"]}, "fine_labels", 100)


DIGITS = {
    "mnist": "MNIST",
    "svhn": "SVHN",
    "usps": "USPS",
    "synth": "SynthDigits",
    "mnistm": "MNIST_M",
}


def _digits(tree, *, parts):
    for d, (domain, folder) in enumerate(DIGITS.items()):
        side = 16 if domain == "usps" else 28
        for split, count in (("train", 40), ("test", 30)):
            rng = np.random.default_rng([d, count])
            shape = (count, side, side) if domain in ("mnist", "usps") else (count, side, side, 3)
            images = rng.integers(0, 256, shape, dtype=np.uint8)
            # no order by class, as in the release
            labels = rng.permutation(np.arange(count) % 10).astype(np.int64)
            files = {f"{split}.pkl": slice(None)}
            if parts and split == "train":
                files = {
                    f"partitions/train_part{i}.pkl": slice(i * count // 10, (i + 1) * count // 10)
                    for i in range(10)
                }
            held = {
                name: pickle.dumps((images[cut], labels[cut]), 4) for name, cut in files.items()
            }
            write_directory(tree.root / folder, held)
            for i in range(count):
                tree.row(f"{domain}/{split}/{i:05d}", int(labels[i]), split, images[i], domain)


def _pairs(tree, name, top, per_class, arrays):
    held = paper.read(name)
    for domain in held.domains:
        for split in ("train", "test"):
            paths = []
            words = []
            # against the alphabet: the order of the list counts
            for i in reversed(range(per_class)):
                for label, folder in enumerate(held.folders):
                    path = f"{domain}/{folder}/{split}_{i:04d}.jpg"
                    raw = tree.image(path)
                    tree.row(f"{domain}/{split}/{len(paths):05d}/{path}", label, split, raw, domain)
                    paths.append(f"{top}/{path}")
                    words.append(folder)
            lists = (np.array(paths), np.array(words, dtype=object)) if arrays else (paths, words)
            write_directory(
                tree.root, {f"{domain}_{split}.pkl": pickle.dumps(lists, pickle.HIGHEST_PROTOCOL)}
            )


def office10_tree(tree):
    held = paper.read("office10")
    for domain in held.domains:
        for label, folder in enumerate(held.folders):
            for i in range(2):
                tree.add(f"{domain}/{folder}/frame_{i:04d}.jpg", label, "train", domain=domain)


def domainnet10_lists(tree):
    held = paper.read("domainnet10")
    for d, domain in enumerate(held.domains):
        for split in ("train", "test"):
            lines = [f"{domain}/aircraft_carrier/{domain}_001_000018.jpg 0"]
            for label, folder in enumerate(held.folders):
                path = f"{domain}/{folder}/{domain}_{9 - label:03d}_{split}.jpg"
                name = f"{domain}/{split}/{label:05d}/{path}"
                tree.add(path, label, split, name=name, domain=domain)
                lines.append(f"{path} {31 + label + d}")
            tree.lines(f"{domain}_{split}.txt", lines)


def _folders(tree, name, tops, file):
    for top, split in tops.items():
        for label, folder in enumerate(paper.read(name).folders):
            tree.add(f"{top}/{folder}/{file.format(folder)}", label, split)


def cinic10(tree):
    for split, code in {"train": "train", "valid": "val", "test": "test"}.items():
        for label, folder in enumerate(paper.read("cinic10").folders):
            tree.add(f"{split}/{folder}/cifar10-{split}-{label}.png", label, code, kind="PNG")


def tiny_imagenet(tree):
    held = paper.read("tiny-imagenet")
    _folders(tree, "tiny-imagenet", {"train": "train"}, "images/{}_0.JPEG")
    lines = []
    for label in range(0, 200, 3):
        tree.add(f"val/images/val_{label}.JPEG", label, "test")
        lines.append(f"val_{label}.JPEG\t{held.folders[label]}\t0\t32\t44\t62\n")
    boxes = {
        f"train/{held.folders[0]}/{held.folders[0]}_boxes.txt": b"n01443537_0.JPEG\t0\t10\t63\t58\n"
    }
    write_directory(
        tree.root, {"val/val_annotations.txt": "".join(lines).encode(), "wnids.txt": b"", **boxes}
    )
    tree.image("test/images/test_0.JPEG")  # has no label


def tiny_imagenet_sorted(tree):
    _folders(tree, "tiny-imagenet", {"train": "train", "val": "test"}, "images/{}_0.JPEG")


def imagenet100(tree):
    _folders(tree, "imagenet100", {"train": "train", "val": "test"}, "{}_10026.JPEG")
    tree.image("train/n01440764/n01440764_18.JPEG")  # tench: in ImageNet, not among the hundred


def _coop(name, file, images, path):
    def write(tree):
        held = paper.read(name)
        lists = {"train": [], "val": [], "test": []}
        for split, entries in lists.items():
            for label in reversed(range(len(held.classes))):
                image = path(held.folders[label], split, label)
                tree.row(image, label, split, tree.image(f"{images}/{image}" if images else image))
                entries.append([image, label, held.classes[label]])
        write_directory(tree.root, {file: json.dumps(lists).encode()})

    return write


def _in_folder(folder, split, label):
    return f"{folder}/image_{split}_{label:04d}.jpg"


caltech101 = _coop("caltech101", "split_zhou_Caltech101.json", "101_ObjectCategories", _in_folder)
flowers102 = _coop(
    "flowers102", "split_zhou_OxfordFlowers.json", "jpg", lambda f, s, n: f"image_{s}_{n:05d}.jpg"
)
pets = _coop("pets", "split_zhou_OxfordPets.json", "images", lambda f, s, n: f"{f}_{s}_{n}.jpg")
dtd = _coop("dtd", "split_zhou_DescribableTextures.json", "images", _in_folder)
eurosat = _coop("eurosat", "split_zhou_EuroSAT.json", "2750", _in_folder)
cars = _coop(
    "cars",
    "split_zhou_StanfordCars.json",
    "",
    lambda f, s, n: f"cars_{'test' if s == 'test' else 'train'}/{s}{n:05d}.jpg",
)
ucf101 = _coop(
    "ucf101",
    "split_zhou_UCF101.json",
    "UCF-101-midframes",
    lambda f, s, n: f"{paper.read('ucf101').classes[n]}/v_{f}_{s}.jpg",
)


def flowers102_official(tree):
    import scipy.io

    ids = {"trnid": [], "valid": [], "tstid": []}
    labels = []
    for number in range(1, 3 * 102 + 1):
        key, split = (("trnid", "train"), ("valid", "val"), ("tstid", "test"))[number % 3]
        label = (7 * number) % 102
        labels.append(label + 1)
        ids[key].append(number)
        tree.add(f"image_{number:05d}.jpg", label, split, below="jpg/")
    scipy.io.savemat(tree.root / "imagelabels.mat", {"labels": np.array([labels], np.uint8)})
    scipy.io.savemat(tree.root / "setid.mat", {k: np.array([v], np.uint16) for k, v in ids.items()})


def pets_official(tree):
    held = paper.read("pets")
    for file, split in (("trainval", "train"), ("test", "test")):
        lines = ["#Image CLASS-ID SPECIES BREED ID"] if split == "train" else []
        for label in range(37):
            name = f"{held.classes[label].title()}_{100 + label}_{split}"
            tree.add(f"{name}.jpg", label, split, below="images/")
            lines.append(f"{name} {label + 1} 1 1")
        tree.lines(f"annotations/{file}.txt", lines)


def dtd_official(tree):
    for split in SPLITS:
        names = []
        for label, folder in enumerate(paper.read("dtd").classes):
            names.append(f"{folder}/{folder}_{split}.jpg")
            tree.add(names[-1], label, split, below="images/")
        tree.lines(f"labels/{split}1.txt", names)


def cars_official(tree):
    import scipy.io

    kinds = [(k, object) for k in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")]
    (tree.root / "devkit").mkdir(parents=True)
    for split, file in (
        ("train", "devkit/cars_train_annos.mat"),
        ("test", "cars_test_annos_withlabels.mat"),
    ):
        table = np.zeros((1, 196), dtype=kinds)
        for i in range(196):
            label = (5 * i) % 196
            table[0, i] = (1, 2, 3, 4, label + 1, f"{i + 1:05d}.jpg")
            tree.add(f"cars_{split}/{i + 1:05d}.jpg", label, split)
        scipy.io.savemat(tree.root / file, {"annotations": table})


def ucf101_official(tree):
    held = paper.read("ucf101")
    for file, split in (("trainlist01", "train"), ("testlist01", "test")):
        lines = []
        for label, folder in enumerate(held.folders):
            video = f"v_{folder}_g{8 if split == 'train' else 1:02d}_c01"
            tree.add(f"{held.classes[label]}/{video}.jpg", label, split, below="UCF-101-midframes/")
            lines.append(f"{folder}/{video}.avi" + (f" {label + 1}" if split == "train" else ""))
        tree.lines(f"ucfTrainTestlist/{file}.txt", lines, "\r\n")


LAYOUTS = {
    "digit5": [partial(_digits, parts=True), partial(_digits, parts=False)],
    "office10": [
        partial(_pairs, name="office10", top="office_caltech_10", per_class=3, arrays=False),
        office10_tree,
    ],
    "domainnet10": [
        partial(_pairs, name="domainnet10", top="DomainNet", per_class=2, arrays=True),
        domainnet10_lists,
    ],
    "cifar10": [cifar10],
    "cifar100": [cifar100],
    "cinic10": [cinic10],
    "tiny-imagenet": [tiny_imagenet, tiny_imagenet_sorted],
    "imagenet100": [imagenet100],
    "caltech101": [caltech101],
    "flowers102": [flowers102, flowers102_official],
    "pets": [pets, pets_official],
    "dtd": [dtd, dtd_official],
    "eurosat": [eurosat],
    "cars": [cars, cars_official],
    "ucf101": [ucf101, ucf101_official],
}
TREES = {(name, i): write for name, layouts in LAYOUTS.items() for i, write in enumerate(layouts)}
"""How to write (dataset, number of its layout)."""


def write(name, layout, root):
    """Write a dataset below ``root``; the rows it should give, sorted by name."""
    root.mkdir(parents=True, exist_ok=True)
    made = Tree(root)
    TREES[name, layout](made)
    return sorted(made.rows, key=lambda row: row.name)


def write_pairs(name, top, root, per_class):
    """``office10`` or ``domainnet10`` in the layout of FedBN's release, with so many images of a class and split."""
    root.mkdir(parents=True, exist_ok=True)
    _pairs(Tree(root), name, top, per_class, arrays=True)
    return root
