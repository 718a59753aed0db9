// The seam for a lane whose two sides do not map one control block: each keeps its own, and the
// link carries the words that its side writes into the other's block.
#pragma once

#include <cstdint>
#include <string>

#include "block.hpp"

namespace tapchannel {

class LaneLink {
 public:
  virtual ~LaneLink() = default;
  // From here on the words of `block` are carried, and the end of the link is also the end of
  // `socket`, so that whoever watches the socket learns of a cut. `socket` stays the caller's.
  virtual void begin(ControlBlock& block, int socket) = 0;
  // A word of this side has changed.
  virtual void kick() = 0;
  // Waits until all words and puts so far have been performed at the other side; false: they were
  // not.
  virtual bool settle(uint64_t limit_ns) = 0;
  // After it returned nothing that the peer sends can land (the fence of DESIGN 6b), and nothing of
  // ours is read any more. Twice is fine.
  virtual void end() noexcept = 0;
  // Why the link failed; empty while it works.
  virtual std::string failure() const = 0;
  // True where what arrives rings this side's bells; false where only looking at the words tells.
  virtual bool rings() const = 0;
};

}  // namespace tapchannel
