// What a producer may write into its control block and its arrival words, and a consumer that goes
// on with its calls.
#include "channel.hpp"

namespace fuzz {

namespace {

class Consumer {
 public:
  explicit Consumer(bool gated) : arena_(map()), gated_(gated) {
    std::vector<ControlBlock> blocks;
    std::vector<std::vector<CellGeometry>> cells;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      blocks.push_back(ControlBlock::create("fuzz", lane, kDepth, kCells, kId));
      cells.push_back(cells_of(lane));
    }
    core_ = std::make_unique<MailboxCore>(std::make_unique<HostPort>(arena_), std::move(blocks),
                                          std::move(cells), kDepth, kSlotBytes, false);
    if (gated_) {
      staging_ = map();
      std::memset(staging_->base(), 0x5a, staging_->bytes());
      must(core_->open_gate(staging_), "the gate opens");
      arrivals_ = Mapping::adopt(core_->arrivals_fd(0, "fuzz"), arrival_bytes(kDepth, kCells));
    }
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      must(core_->attach(lane, peers_[lane].ours(), -1, true, gated_ && lane == 0, nullptr) ==
               MailboxCore::Admission::free,
           "a lane attaches");
  }

  void step(Input& input) {
    switch (input.below(12)) {
      case 0:
        static_cast<void>(core_->open_pass(++step_, 1 + input.below(4)));
        break;
      case 1:
        static_cast<void>(core_->close_pass(0, nullptr));
        break;
      case 2:
        core_->abort("fuzzed");
        break;
      case 3:
        static_cast<void>(core_->reset());
        step_ = 0;
        break;
      case 4:
        receive(input);
        break;
      case 5:
        if (!leases_.empty()) drop(input.below(leases_.size()));
        break;
      case 6:
        for (uint64_t lease : leases_) {
          static_cast<void>(core_->check_lease(lease));
          static_cast<void>(core_->settle(lease, 0, nullptr));
        }
        break;
      case 7:
        look(input);
        break;
      case 8:
      case 9:
        push(input);
        break;
      default:
        scribble(input, core_->block(static_cast<uint32_t>(input.below(kLanes))));
    }
  }

  void end() {
    while (!leases_.empty()) drop(0);
    core_->close();
    if (gated_) check_slots();
  }

 private:
  static std::shared_ptr<Mapping> map() {
    return std::make_shared<Mapping>(Mapping::create("fuzz", kSlotBytes * kDepth));
  }

  void receive(Input& input) {
    RecvRequest request;
    request.microbatch = input.below(5);
    request.mode = WaitMode::attempt;
    request.rows = static_cast<int64_t>(input.below(5)) - 1;
    request.need_announces = request.rows < 0;
    auto [verdict, lease] = core_->recv(request);
    if (verdict) return;
    leases_.push_back(lease);
    static_cast<void>(core_->check_lease(lease));
  }

  void drop(size_t index) {
    core_->drop(leases_[index]);
    leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  // Numbers that are handed out must be usable as sizes.
  void look(Input& input) {
    uint64_t key = word_from(input);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      for (uint32_t cell = 0; cell <= kCells; ++cell) {
        AnnounceFacts facts = core_->announce(lane, cell, key);
        if (!facts.present) continue;
        must(facts.rows <= kRows && facts.row_begin <= kRows - facts.rows, "rows lie in the cell");
        must(!facts.shape.empty() && facts.shape.size() <= kMaxDims, "a shape has 1 to 8 sizes");
        uint64_t elements = 1;
        for (uint64_t size : facts.shape) elements *= size;
        must(elements == facts.rows * 4 || facts.rows == 0, "the shape is that of the rows");
      }
      static_cast<void>(core_->lane_status(lane));
      must(read_ring(core_->block(lane).producer_ring()).size() <= kRingEntries,
           "a ring is bounded");
    }
    static_cast<void>(core_->check());
    static_cast<void>(core_->holders());
  }

  // What a producer does that follows the protocol, so that what follows it is reached, too.
  void push(Input& input) {
    uint64_t epoch = core_->epoch(), microbatch = input.below(4);
    uint64_t key = make_stamp(epoch, step_, microbatch + 1);
    uint64_t rows = input.below(kRows + 1);
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      for (uint32_t cell = 0; cell < kCells; ++cell) {
        ControlBlock& block = core_->block(lane);
        Announce& announce = block.announce(microbatch % kDepth, cell);
        announce.rows = rows;
        announce.row_begin = 0;
        announce.dtype = 1;
        announce.ndim = 2;
        announce.shape[0] = rows;
        announce.shape[1] = 4;
        announce.key.store(key);
        size_t at = microbatch % kDepth * kCells + cell;
        if (gated_ && lane == 0)
          arrival(arrivals_, at).store(key);
        else
          block.stamp(microbatch % kDepth, cell).store(key);
        ring(block.producer().bell);
      }
  }

  // The gate copies for lane 0, and nobody writes for lane 1.
  void check_slots() const {
    for (size_t i = 0; i < kSlotBytes * kDepth; ++i)
      must(arena_->base()[i] == 0 || i % kPitch < kRowBytes * kCells,
           "the gate keeps to its lane's cells");
    for (size_t i = kSlotBytes * kDepth; i < arena_->bytes(); ++i)
      must(arena_->base()[i] == 0, "nothing lies behind the slots");
  }

  std::shared_ptr<Mapping> arena_, staging_;
  Mapping arrivals_;
  bool gated_;
  Connected peers_[kLanes];
  std::unique_ptr<MailboxCore> core_;
  std::vector<uint64_t> leases_;
  uint64_t step_ = 0;
};

}  // namespace

void mailbox(Input& input) {
  Consumer consumer(input.below(4) == 0);
  for (int steps = 0; steps < 64 && !input.empty(); ++steps) consumer.step(input);
  consumer.end();
}

}  // namespace fuzz
