"""The goods of the small shop, and the wishes of its customers."""

import random
from dataclasses import dataclass, field
from itertools import product

GOAL_SEED = 233  # WebShop's seed for its goals


@dataclass(frozen=True)
class Product:
    """One article. `query` and `category` name its kind, `attributes` the properties that customers want."""

    asin: str
    title: str
    price: float  # dollars
    query: str
    category: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    description: str = ""
    bullets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Goal:
    """A customer's goal. The price must not be above `price_upper` dollars."""

    asin: str
    query: str
    category: str
    title: str
    attributes: tuple[str, ...]
    options: dict[str, str]
    price_upper: float

    @property
    def instruction(self) -> str:
        wishes = [*self.attributes, *(f"{name}: {value}" for name, value in self.options.items())]
        wanted = ", and ".join([*wishes, f"price lower than {self.price_upper:.2f} dollars"])
        return f"i need a {self.query} that is {wanted}"


_CLOTHES = "Clothing, Shoes & Jewelry › Men › Clothing"
_KITCHEN = "Home & Kitchen › Kitchen & Dining"
_SIZES = ("small", "medium", "large", "x-large")

PRODUCTS: tuple[Product, ...] = (
    Product(
        "B0MINI0001", "Alder Trail Mens Rain Jacket with Packable Hood, Light Shell for Hiking", 48.5,
        "mens rain jacket", f"{_CLOTHES} › Jackets & Coats", ("waterproof", "machine wash", "light weight"),
        {"color": ("navy blue", "forest green", "black"), "size": _SIZES},
        "A thin shell that keeps the rain out and folds into its own pocket.",
        ("Waterproof seams", "Machine wash cold", "Weighs less than an apple"),
    ),
    Product(
        "B0MINI0002", "Alder City Mens Wool Coat, Long Winter Overcoat", 129.0,
        "mens wool coat", f"{_CLOTHES} › Jackets & Coats", ("dry clean only", "long sleeve", "slim fit"),
        {"color": ("camel", "charcoal grey"), "size": _SIZES},
        "A long coat of thick wool for cold mornings in town.",
        ("Dry clean only", "Two inner pockets"),
    ),
    Product(
        "B0MINI0003", "Quiet Step Women's Canvas Sneakers, Low Top Walking Shoes", 32.99,
        "womens canvas sneakers", "Clothing, Shoes & Jewelry › Women › Shoes",
        ("rubber sole", "non slip", "memory foam"),
        {"color": ("white", "red", "navy blue"), "size": ("6", "7", "8", "9")},
        "Canvas shoes with a soft insole for a day on your feet.",
        ("Rubber sole that grips wet floors", "Memory foam insole"),
    ),
    Product(
        "B0MINI0004", "Quiet Step Women's Leather Ankle Boots with Side Zip", 74.95,
        "womens ankle boots", "Clothing, Shoes & Jewelry › Women › Shoes",
        ("genuine leather", "rubber sole", "low heel"),
        {"color": ("brown", "black"), "size": ("6", "7", "8", "9")},
        "Ankle boots of soft leather that are put on in a moment.",
        ("Genuine leather upper", "Low heel"),
    ),
    Product(
        "B0MINI0005", "Harbor & Pine Stoneware Coffee Mug Set, Four Cups", 27.4,
        "coffee mug set", f"{_KITCHEN} › Dining & Entertaining", ("dishwasher safe", "microwave safe", "set of four"),
        {"color": ("sand", "sea blue", "white")},
        "Four heavy mugs with handles that fit a whole hand.",
        ("Dishwasher safe", "Microwave safe", "Holds 12 ounces"),
    ),
    Product(
        "B0MINI0006", "Harbor & Pine Cast Iron Skillet, Pre Seasoned Frying Pan", 36.0,
        "cast iron skillet", f"{_KITCHEN} › Cookware", ("pre seasoned", "oven safe", "heavy duty"),
        {"size": ("8 inch", "10 inch", "12 inch")},
        "A pan for the stove, the oven and the camp fire.",
        ("Pre seasoned with oil", "Oven safe"),
    ),
    Product(
        "B0MINI0007", "Morning Ridge Decaf Ground Coffee, Medium Roast", 14.25,
        "decaf ground coffee", "Grocery & Gourmet Food › Beverages › Coffee",
        ("decaffeinated", "fair trade", "medium roast"),
        {"flavor name": ("hazelnut", "vanilla", "original"), "size": ("12 ounce", "24 ounce")},
        "Ground coffee without caffeine, roasted in small batches.",
        ("Fair trade beans", "Decaffeinated with water"),
    ),
    Product(
        "B0MINI0008", "Green Hollow Loose Leaf Herbal Tea in Tin, Caffeine Free", 11.8,
        "herbal tea", "Grocery & Gourmet Food › Beverages › Tea", ("caffeine free", "usda organic", "loose leaf"),
        {"flavor name": ("peppermint", "chamomile", "ginger lemon")},
        "Herbs from small farms, dried slowly.",
        ("USDA organic", "No caffeine"),
    ),
    Product(
        "B0MINI0009", "Lumen Desk Lamp with Dimmer, Adjustable LED Reading Light", 42.1,
        "desk lamp", "Tools & Home Improvement › Lighting & Ceiling Fans",
        ("energy efficient", "easy to install", "dimmable"),
        {"color": ("silver", "matte black", "white")},
        "A lamp whose arm stays where it is put.",
        ("Dimmable in five steps", "Energy efficient LED"),
    ),
    Product(
        "B0MINI0010", "Bright Path Wireless Earbuds with Charging Case and Microphone", 59.9,
        "wireless earbuds", "Electronics › Headphones", ("noise cancelling", "fast charging", "water resistant"),
        {"color": ("black", "rose pink")},
        "Earbuds that stay in and last a day with their case.",
        ("Noise cancelling microphone", "Fast charging case"),
    ),
)  # fmt: skip


def goals() -> list[Goal]:
    """Returns all choices of options of all products with one or two attributes, in a fixed random order."""
    random_numbers = random.Random(GOAL_SEED)
    made = []
    for item in PRODUCTS:
        for values in product(*item.options.values()):
            wanted = tuple(random_numbers.sample(item.attributes, random_numbers.randint(1, 2)))
            upper = float(10 * (int(item.price / 10) + random_numbers.randint(1, 3)))
            options = dict(zip(item.options, values, strict=True))
            made.append(Goal(item.asin, item.query, item.category, item.title, wanted, options, upper))
    random_numbers.shuffle(made)
    return made
