// What a native call found out. Python builds the typed errors from it; no text is made here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tapchannel {

// One list: the enum, and the names by which Python knows them.
#define TAPCHANNEL_FAULTS(X)                                                                    \
  X(none)                                                                                       \
  X(closed)           /* this object was closed */                                              \
  X(forked)           /* this object belongs to the parent process */                           \
  X(no_pass)          /* no pass is open */                                                     \
  X(pass_open)        /* a pass is open already */                                              \
  X(step_not_growing) /* open_pass with a step not larger than the last: seen, expected */      \
  X(bad_microbatch)   /* the key is outside the pass; key counts the pass's microbatches */     \
  X(pushed_twice)                                                                               \
  X(received_twice)                                                                             \
  X(bad_cell)                                                                                   \
  X(bad_rows)                                                                                   \
  X(capturing) /* a CUDA graph is being captured on the stream */                               \
  X(queue_full)                                                                                 \
  X(credit_timeout) /* producer: no credit; consumer: the slot is held, see holders */          \
  X(stamp_timeout)                                                                              \
  X(announce_timeout) /* the producer has not even announced */                                 \
  X(held)             /* the slot that the key needs is held: waiting would be for ever */      \
  X(peer_lost)                                                                                  \
  X(peer_closed)                                                                                \
  X(revoked) /* the mailbox took the lane's access away */                                      \
  X(never_attached)                                                                             \
  X(aborted_by_peer)                                                                            \
  X(aborted_here)                                                                               \
  X(epoch_mismatch)                                                                             \
  X(pass_mismatch) /* both sides opened the step, with different microbatch counts */           \
  X(pass_over)     /* the peer is already at a later pass */                                    \
  X(source_modified)                                                                            \
  X(device_error)                                                                               \
  X(overrun)      /* a stamp newer than the key: the lane wrote without credit */               \
  X(stale_stamp)  /* an older stamp in the cell of an open lease: something was written late */ \
  X(bad_announce) /* an announce that does not fit the plan */                                  \
  X(rows_differ)  /* announced rows are not those that recv named: seen, expected */            \
  X(interrupted)  /* the caller was interrupted while it waited */                              \
  X(would_block)                                                                                \
  X(incomplete) /* a pass was closed before every key was pushed / received */

enum class Fault : int {
#define TAPCHANNEL_FAULT(name) name,
  TAPCHANNEL_FAULTS(TAPCHANNEL_FAULT)
#undef TAPCHANNEL_FAULT
};

inline const char* name_of(Fault fault) {
  static const char* const names[] = {
#define TAPCHANNEL_FAULT(name) #name,
      TAPCHANNEL_FAULTS(TAPCHANNEL_FAULT)
#undef TAPCHANNEL_FAULT
  };
  return names[static_cast<int>(fault)];
}

struct Holder {
  uint64_t step = 0;
  uint64_t microbatch = 0;
  int slot = 0;
  bool leased = false;  // a live view holds it; otherwise it was never received
};

struct Verdict {
  Fault fault = Fault::none;
  int lane = -1;
  int cell = -1;
  int slot = -1;
  uint64_t key = 0;
  uint64_t seen = 0;
  uint64_t expected = 0;
  double waited = 0;
  double limit = 0;
  double silent = -1;  // seconds since the peer's last heartbeat
  std::string reason;  // the peer's own words, untrusted
  std::vector<Holder> holders;
  static Verdict of(Fault fault, uint64_t key = 0, int cell = -1) {
    Verdict made;
    made.fault = fault;
    made.key = key;
    made.cell = cell;
    return made;
  }
  explicit operator bool() const { return fault != Fault::none; }
};

}  // namespace tapchannel
