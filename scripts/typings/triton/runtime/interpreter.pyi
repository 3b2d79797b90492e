from typing import Any

InterpreterBuilder: Any
_patch_lang_tensor: Any
