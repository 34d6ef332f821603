"""Small rooms for games of our own: which receptacles and things there are, and one task in each room.

The domain and the grammar are ALFWorld's; only the problem (who is where) is written here.
"""

import random
from dataclasses import dataclass, field

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
_OPENABLE = ("Fridge", "Microwave", "Cabinet", "Drawer")
# Every problem must have the objects that the domain names.
_NAMED_RECEPTACLES = ("SinkBasin", "Microwave", "Fridge")
_NAMED_OBJECTS = ("Knife", "ButterKnife")
_FURNITURE = ("CounterTop", "CounterTop", "DiningTable", "Shelf", "Shelf", "Cabinet", "Cabinet", "Drawer")
_APPLIANCES = ("SinkBasin", "Microwave", "Fridge")
_LAMP = "DeskLamp"
# What can be done with a thing.
_ABLE: dict[str, tuple[str, ...]] = {
    "Apple": ("heatable", "coolable", "cleanable"),
    "Bread": ("heatable", "coolable"),
    "Egg": ("heatable", "coolable", "cleanable"),
    "Potato": ("heatable", "coolable", "cleanable"),
    "Tomato": ("heatable", "coolable", "cleanable"),
    "Mug": ("heatable", "coolable", "cleanable"),
    "Plate": ("heatable", "coolable", "cleanable"),
    "Bowl": ("coolable", "cleanable"),
    "Pan": ("coolable", "cleanable"),
    "Knife": ("cleanable",),
    "Spoon": ("cleanable",),
    "Book": (),
    "Candle": (),
    "SaltShaker": (),
}
_NEEDS = {
    "pick_clean_then_place_in_recep": "cleanable",
    "pick_heat_then_place_in_recep": "heatable",
    "pick_cool_then_place_in_recep": "coolable",
}
_WISHES = {
    "pick_and_place_simple": "put a {thing} in {place}.",
    "look_at_obj_in_light": "examine the {thing} with the desklamp.",
    "pick_clean_then_place_in_recep": "put a clean {thing} in {place}.",
    "pick_heat_then_place_in_recep": "put a hot {thing} in {place}.",
    "pick_cool_then_place_in_recep": "put a cool {thing} in {place}.",
    "pick_two_obj_and_place": "put two {thing} in {place}.",
}


@dataclass
class Room:
    """`receptacles`: id -> type; `things`: id -> (type, id of the receptacle it is in)."""

    task_type: str
    thing: str
    place: str
    receptacles: dict[str, str]
    things: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def wish(self) -> str:
        return _WISHES[self.task_type].format(thing=self.thing.lower(), place=self.place.lower())


def draw_room(task_type: str, seed: int) -> Room:
    """A random room in which the task can be done."""
    random_numbers = random.Random(f"alfworld {task_type} {seed}")
    receptacles: dict[str, str] = {}
    for number, kind in enumerate((*_FURNITURE, *_APPLIANCES)):
        receptacles[_receptacle_id(kind, number)] = kind
    need = _NEEDS.get(task_type)
    thing = random_numbers.choice([name for name, able in _ABLE.items() if need is None or need in able])
    place = random_numbers.choice(("CounterTop", "DiningTable", "Shelf", "Cabinet", "Drawer"))
    room = Room(task_type, thing, place, receptacles)
    elsewhere = [name for name, kind in receptacles.items() if kind not in (place, "Microwave", "SinkBasin")]
    wanted = [thing, thing] if task_type == "pick_two_obj_and_place" else [thing]
    others = random_numbers.sample([name for name in _ABLE if name != thing], 6)
    for number, kind in enumerate([*wanted, *others]):
        room.things[f"{kind.lower()}_bar_{number:02}"] = (kind, random_numbers.choice(elsewhere))
    if task_type == "look_at_obj_in_light":
        tables = [name for name, kind in receptacles.items() if kind in ("DiningTable", "Shelf")]
        room.things["desklamp_bar_00"] = (_LAMP, random_numbers.choice(tables))
    return room


def _receptacle_id(kind: str, number: int) -> str:
    # ALFWorld makes names of ids, and knows the basin of a sink by this spelling.
    return f"sink_bar_{number:02}_bar_sinkbasin" if kind == "SinkBasin" else f"{kind.lower()}_bar_{number:02}"


def problem(room: Room, goal: str) -> str:
    """The room as a PDDL problem. `goal` is ALFWorld's, with everything up to the end of the definition."""
    kinds = sorted({*room.receptacles.values(), *_NAMED_RECEPTACLES})
    things = sorted({kind for kind, _ in room.things.values()} | set(_NAMED_OBJECTS))
    places = {name: f"loc_{number}" for number, name in enumerate(room.receptacles, 1)}
    objects = ["agent1 - agent", "loc_0 - location", *(f"{place} - location" for place in places.values())]
    objects += [f"{name} - receptacle" for name in room.receptacles] + [f"{name} - object" for name in room.things]
    objects += [f"{kind}Type - rtype" for kind in kinds] + [f"{kind}Type - otype" for kind in things]
    facts = ["(atLocation agent1 loc_0)", "(= (total-cost) 0)"]
    for name, kind in room.receptacles.items():
        facts += [f"(receptacleType {name} {kind}Type)", f"(receptacleAtLocation {name} {places[name]})"]
        facts += [f"(openable {name})"] if kind in _OPENABLE else []
    for name, (kind, inside) in room.things.items():
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {inside})"]
        facts.append(f"(objectAtLocation {name} {places[inside]})")
        facts += [f"({able} {name})" for able in ("toggleable",) if kind == _LAMP]
        facts += [f"({able} {name})" for able in ("pickupable", *_ABLE.get(kind, ())) if kind != _LAMP]
    facts += [f"(canContain {place}Type {kind}Type)" for place in kinds for kind in things if kind != _LAMP]
    lines = ["(define (problem room)", "(:domain alfred)", "(:objects", *objects, ")", "(:init", *facts, ")"]
    return "\n".join([*lines, goal])
