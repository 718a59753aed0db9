"""I9: a slot is not released while anything may still read it."""

from __future__ import annotations

from support.mutations.mutation import Edit, Mutation, mutation

TESTS = "tests/integration/test_invariants_autograd.py"

MUTATIONS = (
    Mutation(
        "slot-back-with-the-block",
        "I9",
        (
            f"{TESTS}::test_i9_gradients_are_bit_for_bit_those_of_cloned_taps",
            f"{TESTS}::test_i9_several_backwards_over_one_lease",
            f"{TESTS}::test_i9_whatever_holds_the_storage_holds_the_slot",
        ),
        (
            Edit(
                "tapchannel/lease.py",
                "        self._flat: torch.Tensor | None = flat\n",
                "        import ctypes\n\n"
                "        self._owner: torch.Tensor | None = flat\n"
                "        octets = (ctypes.c_uint8 * flat.numel()).from_address(flat.data_ptr())\n"
                "        flat = torch.frombuffer(octets, dtype=torch.uint8)\n"
                "        self._flat: torch.Tensor | None = flat\n",
            ),
            Edit(
                "tapchannel/lease.py",
                "        self._views = {}\n        self._flat = None\n",
                "        self._views = {}\n        self._flat = self._owner = None\n",
            ),
        ),
    ),
    mutation(
        "holder-unnamed",
        "I9",
        (
            f"{TESTS}::test_i9_a_view_kept_on_purpose_is_named",
            f"{TESTS}::test_i9_a_host_wait_for_a_kept_view_names_it_at_its_deadline",
        ),
        "tapchannel/verdicts.py",
        'f"slot {holder.slot} is still held by a live tensor view since "',
        'f"a slot is still held by a live tensor view since "',
    ),
)
