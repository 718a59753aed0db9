// What a consumer may write into the control block, and a producer that goes on with its calls.
#include "channel.hpp"

namespace fuzz {

namespace {

class Producer {
 public:
  explicit Producer(bool drop_newest)
      : arena_(std::make_shared<Mapping>(Mapping::create("fuzz", kSlotBytes * kDepth))),
        shared_(ControlBlock::create("fuzz", 0, kDepth, kCells, kId)) {
    int fd = fcntl(shared_.memory().fd(), F_DUPFD_CLOEXEC, 3);
    core_ = std::make_unique<OutboxCore>(ControlBlock::adopt(fd, 0, kDepth, kCells, kId),
                                         std::make_unique<ShmTransport>(arena_), cells_of(0),
                                         kSlotBytes, drop_newest, 4, 0.001, 0, peer_.ours());
    shared_.consumer().epoch.value.store(1);
    core_->start([] {});
  }

  void step(Input& input) {
    switch (input.below(9)) {
      case 0:
        static_cast<void>(core_->open_pass(++step_, 1 + input.below(4)));
        break;
      case 1:
        static_cast<void>(core_->close_pass());
        break;
      case 2:
        core_->abort("fuzzed");
        break;
      case 3:
        static_cast<void>(core_->flush(0, nullptr));
        break;
      case 4:
        grant(input);
        break;
      case 5:
      case 6:
        push(input);
        break;
      default:
        scribble(input, shared_);
    }
    retire(core_->take_retired(false));
  }

  void end() {
    core_->close();
    retire(core_->take_retired(false));
    must(retired_ == pushed_, "every source is given back, once");
    for (size_t i = 0; i < arena_->bytes(); ++i)
      must(arena_->base()[i] == 0 || (i < kSlotBytes * kDepth && i % kPitch < kRowBytes * kCells),
           "a lane writes its own cells only");
  }

 private:
  void push(Input& input) {
    Push push;
    push.microbatch = input.below(5);
    push.cell = static_cast<uint32_t>(input.below(kCells + 1));
    push.row_begin = input.below(4) == 0 ? word_from(input) : 0;
    push.source.rows = input.below(4) == 0 ? word_from(input) : input.below(kRows + 1);
    push.source.data = source_;
    push.source.pitch = kRowBytes;
    push.ndim = 2;
    push.shape[0] = push.source.rows;
    push.shape[1] = 4;
    push.owner = this;
    if (!core_->push(push, nullptr)) ++pushed_;
  }

  // What a consumer does that follows the protocol.
  void grant(Input& input) {
    auto& words = shared_.consumer();
    uint64_t count = 1 + input.below(4);
    words.open_pass.value.store(make_stamp(1, step_, count));
    words.credit.value.store(make_stamp(1, step_, count));
    ring(words.bell);
  }

  void retire(const std::vector<Retired>& sources) {
    for (const Retired& source : sources) {
      must(source.owner == this, "a source comes back as it was given");
      ++retired_;
    }
  }

  std::shared_ptr<Mapping> arena_;
  ControlBlock shared_;
  Connected peer_;
  uint8_t source_[kRows * kRowBytes] = {1, 2, 3, 4, 5, 6, 7, 8};
  std::unique_ptr<OutboxCore> core_;
  size_t pushed_ = 0, retired_ = 0;
  uint64_t step_ = 0;
};

}  // namespace

void outbox(Input& input) {
  Producer producer(input.below(2) == 0);
  for (int steps = 0; steps < 64 && !input.empty(); ++steps) producer.step(input);
  producer.end();
}

}  // namespace fuzz
