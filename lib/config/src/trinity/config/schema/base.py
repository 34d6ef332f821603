"""What all sections share: unknown keys are errors, and a value is never converted to another type."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A mapping in the YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _no_bools_as_numbers(cls, values: Any) -> Any:
        """`true` for a number is a mistake, not a one."""
        if isinstance(values, dict):
            for name, value in values.items():
                field = cls.model_fields.get(name)
                if isinstance(value, bool) and field is not None and field.annotation in (int, float):
                    raise ValueError(f"{name} is {str(value).lower()}, must be a number")
        return values
