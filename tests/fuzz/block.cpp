// A memfd that a peer sent as a control block: its size, seals, header and recorder rings.
#include "channel.hpp"

namespace fuzz {

void block(Input& input) {
  uint32_t depth = input.below(4) == 0 ? input.take<uint32_t>() : kDepth;
  uint32_t cells = input.below(4) == 0 ? input.take<uint32_t>() : kCells;
  size_t bytes = BlockLayout{kDepth, kCells}.bytes();
  if (input.below(4) == 0) bytes = 1 + input.take<uint16_t>();
  Mapping made = Mapping::create("fuzz", bytes);
  BlockHeader header{kMagic, kLayoutVersion, 0, kDepth, kCells, bytes, {1, 2, 3}};
  if (input.below(2) == 0) {
    uint8_t* at = reinterpret_cast<uint8_t*>(&header) + input.below(sizeof(header) - 8);
    uint64_t word = word_from(input);
    std::memcpy(at, &word, sizeof(word));
  }
  std::memcpy(made.base(), &header, std::min(bytes, sizeof(header)));
  if (bytes == BlockLayout{kDepth, kCells}.bytes()) {
    auto* words = reinterpret_cast<uint64_t*>(made.base());
    BlockLayout layout{kDepth, kCells};
    words[layout.producer_ring() / 8] = word_from(input);
    for (int i = 0; i < 8; ++i)
      words[layout.producer_ring() / 8 + input.take<uint16_t>() % (sizeof(Ring) / 8)] =
          word_from(input);
  }
  int fd = fcntl(made.fd(), F_DUPFD_CLOEXEC, 3);
  try {
    ControlBlock adopted = ControlBlock::adopt(fd, 0, depth, cells, kId);
    must(depth == kDepth && cells == kCells, "a block of another shape is refused");
    must(read_ring(adopted.producer_ring()).size() <= kRingEntries, "a ring is bounded");
    must(read_text(adopted.producer().reason).size() <= kTextBytes, "a text is bounded");
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace fuzz
