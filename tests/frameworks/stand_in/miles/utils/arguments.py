"""In the shape of miles's command line, with the options that a custom loss needs."""

from typing import Any


def get_miles_extra_args_provider(add_custom_arguments: Any = None) -> Any:
    def add_miles_arguments(parser: Any) -> Any:
        parser.add_argument("--loss-type", choices=["policy_loss", "custom_loss"], default="policy_loss")
        parser.add_argument("--custom-loss-function-path")
        parser.add_argument("--rollout-temperature", type=float, default=1.0)
        return parser

    return add_miles_arguments


def miles_validate_args(args: Any) -> None:
    assert args.loss_type != "custom_loss" or args.custom_loss_function_path
