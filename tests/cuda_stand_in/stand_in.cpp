// Device cuda:0 in RAM. See __init__.py for what it shows.
//
// Every operation runs when it is issued, which is one of the orders that streams allow. Whether another order would
// have been allowed too is found with vector clocks: a stream's clock counts its operations and holds what it knows to
// have ended on each other stream. The host has one clock for all of its threads: what one of them has waited for is
// taken to be known to all, so a handover between threads that lacks a lock goes unseen here.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>  // torch/extension.h takes twice as long to compile
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::Stream;

const Device CUDA(DeviceType::CUDA, 0);
std::recursive_mutex mutex;  // guards all that follows
using Locked = std::lock_guard<std::recursive_mutex>;

// --- memory: where tensors say that it is, without access, and as much where kernels reach it ----------------------

constexpr size_t DEVICE_BYTES = size_t(4) << 30;
char* shown = nullptr;
char* reached = nullptr;

void map_memory() {
  auto map = [](int access) {
    void* at = mmap(nullptr, DEVICE_BYTES, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED);
    return static_cast<char*>(at);
  };
  shown = map(PROT_NONE);
  reached = map(PROT_READ | PROT_WRITE);
}

bool on_device(const void* at) { return at >= shown && at < shown + DEVICE_BYTES; }

char* reach(const void* at) {
  char* address = static_cast<char*>(const_cast<void*>(at));
  return on_device(at) ? reached + (address - shown) : address;
}

// --- what happens before what ---------------------------------------------------------------------------------------

constexpr int STREAMS = 33;  // the default one, and as many as torch has in its pool
using Clock = std::array<uint64_t, STREAMS>;
std::array<Clock, STREAMS> clocks{};
Clock host{};
std::unordered_map<int64_t, Clock> events;
int64_t next_event = 1;
int next_stream = 0;
thread_local int current = 0;

void learn(Clock& of, const Clock& from) {
  std::transform(of.begin(), of.end(), from.begin(), of.begin(), [](auto a, auto b) { return std::max(a, b); });
}

int last_error = 0;  // of a call to CUDA's runtime that failed: the next launch raises it

Clock& issue() {  // whatever is issued follows all that the host has waited for
  TORCH_CHECK(std::exchange(last_error, 0) == 0, "CUDA error: left by an earlier call");
  learn(clocks[current], host);
  ++clocks[current][current];
  return clocks[current];
}

void wait_for_stream(int stream) {
  Locked locked(mutex);
  learn(clocks[stream], host);
  learn(host, clocks[stream]);
}

void wait_for_device() {
  for (int stream = 0; stream < STREAMS; ++stream) wait_for_stream(stream);
}

// --- accesses to bytes, and races between them ----------------------------------------------------------------------

struct Access {
  int stream = -1;
  uint64_t at = 0;
  std::string_view by;
};
struct Bytes {  // a range of bytes with the same history
  uintptr_t end;
  Access written;
  std::vector<Access> read;
};
std::map<uintptr_t, Bytes> history;
std::vector<std::string> races;
constexpr size_t MOST_RACES = 20;

void cut(uintptr_t at) {
  auto found = history.upper_bound(at);
  if (found == history.begin()) return;
  --found;
  if (found->first == at || found->second.end <= at) return;
  Bytes tail = found->second;
  found->second.end = at;
  history.emplace(at, std::move(tail));
}

void report(const Access& now, bool writes, const Access& then, bool wrote, uintptr_t at, uintptr_t end) {
  if (races.size() >= MOST_RACES) return;
  std::ostringstream text;
  text << (writes ? "write by " : "read by ") << now.by << " on stream " << now.stream << " is not ordered after "
       << (wrote ? "write by " : "read by ") << then.by << " on stream " << then.stream << ": " << end - at
       << (on_device(reinterpret_cast<void*>(at)) ? " bytes of the device" : " bytes of RAM");
  races.push_back(text.str());
}

void access(const void* start, size_t nbytes, bool writes, std::string_view by) {
  if (nbytes == 0) return;
  const Clock& known = clocks[current];
  const Access now{current, known[current], by};
  auto ordered = [&](const Access& a) { return a.stream < 0 || a.stream == current || known[a.stream] >= a.at; };
  uintptr_t at = reinterpret_cast<uintptr_t>(start), end = at + nbytes;
  cut(at);
  cut(end);
  for (auto next = history.lower_bound(at); at < end; ++next) {
    uintptr_t until = next == history.end() ? end : std::min(end, next->first);
    if (at < until) next = history.emplace(at, Bytes{until, {}, {}}).first;  // never touched before
    Bytes& bytes = next->second;
    if (!ordered(bytes.written)) report(now, writes, bytes.written, true, at, bytes.end);
    if (writes) {
      for (const Access& then : bytes.read)
        if (!ordered(then)) report(now, true, then, false, at, bytes.end);
      bytes.written = now;
      bytes.read.clear();
    } else {
      auto mine = [&](const Access& a) { return a.stream == current; };
      auto found = std::find_if(bytes.read.begin(), bytes.read.end(), mine);
      found == bytes.read.end() ? bytes.read.push_back(now) : void(*found = now);
    }
    at = bytes.end;
  }
}

void access(const Tensor& tensor, bool writes, std::string_view by) {
  if (tensor.numel() == 0) return;
  int64_t last = 0;  // of the elements: what lies between rows counts as accessed too
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  access(tensor.const_data_ptr(), (last + 1) * tensor.element_size(), writes, by);
}

// --- allocation: a block that is freed goes to whoever asks next on the same stream, as torch's allocator has it -----

struct Block {
  size_t nbytes;
  int stream;
};
std::unordered_map<char*, Block> taken;
std::map<std::pair<int, size_t>, std::vector<char*>> spare;
size_t handed_out = 0, allocated = 0;

void give_back(void* at) {
  Locked locked(mutex);
  auto found = taken.find(static_cast<char*>(at));
  if (found == taken.end()) return;
  auto [nbytes, stream] = found->second;
  allocated -= nbytes;
  spare[{stream, nbytes}].push_back(found->first);
  taken.erase(found);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    if (asked == 0) return {nullptr, nullptr, &give_back, CUDA};
    Locked locked(mutex);
    size_t nbytes = (asked + 511) / 512 * 512;
    auto& spares = spare[{current, nbytes}];
    if (spares.empty()) {
      bool fits = handed_out + nbytes <= DEVICE_BYTES;
      TORCH_CHECK_WITH(OutOfMemoryError, fits, "CUDA out of memory. Tried to allocate ", nbytes, " bytes.");
      spares.push_back(shown + handed_out);
      handed_out += nbytes;
    }
    char* at = spares.back();
    spares.pop_back();
    taken[at] = {nbytes, current};
    allocated += nbytes;
    memset(reach(at), 0xFF, nbytes);
    return {at, at, &give_back, CUDA};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(reach(to), reach(from), n); }
} allocator;

// --- pinned RAM, and what callers wait for -----------------------------------------------------------------------------

std::map<uintptr_t, size_t> pinned;
size_t most_pinned = SIZE_MAX;  // at once
std::map<std::string, int64_t> counts;

bool is_pinned(const void* at, size_t nbytes = 1) {  // all of it, at once
  Locked locked(mutex);
  auto next = pinned.upper_bound(reinterpret_cast<uintptr_t>(at));
  if (next == pinned.begin()) return false;
  return reinterpret_cast<uintptr_t>(at) + nbytes <= std::prev(next)->first + std::prev(next)->second;
}

int pin(uintptr_t at, size_t nbytes) {
  Locked locked(mutex);
  if (nbytes > most_pinned) return last_error = 2;
  pinned[at] = nbytes;
  return 0;
}

void unpin(void* at) {
  Locked locked(mutex);
  pinned.erase(reinterpret_cast<uintptr_t>(at));
  c10::GetAllocator(DeviceType::CPU)->raw_deallocate(at);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* at = c10::GetAllocator(DeviceType::CPU)->raw_allocate(nbytes);
    Locked locked(mutex);
    pinned[reinterpret_cast<uintptr_t>(at)] = nbytes;
    return {at, at, &unpin, c10::Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned_allocator;

// --- what torch asks of a device -----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream(int number) { return Stream(Stream::UNSAFE, CUDA, number); }
  static int number(const Stream& stream) { return static_cast<int>(stream.id()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return CUDA; }
  Device getDevice() const override { return CUDA; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream exchangeStream(Stream next) const override { return stream(std::exchange(current, number(next))); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { wait_for_stream(number(stream)); }
  void synchronizeDevice(DeviceIndex) const override { wait_for_device(); }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Locked locked(mutex);
    if (*event == nullptr) *event = new Clock{};
    learn(clocks[number(stream)], host);
    *static_cast<Clock*>(*event) = clocks[number(stream)];
  }
  void block(void* event, const Stream& stream) const override {
    Locked locked(mutex);
    if (event != nullptr) learn(clocks[number(stream)], *static_cast<Clock*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    Locked locked(mutex);
    if (event != nullptr) learn(host, *static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  void deviceSynchronize(DeviceIndex) const override { wait_for_device(); }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
};

}  // namespace

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)

namespace {

// --- operations: the CPU's, on the same bytes ------------------------------------------------------------------------

struct Twins {  // tensors of the device as tensors of the CPU, and back
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;
  std::unordered_map<const void*, c10::Storage> owners;  // by the address that kernels reach
  std::vector<std::pair<Tensor, Tensor>> written;        // (of the device, of the CPU)

  Tensor on_cpu(const Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages.find(storage);
    if (found == storages.end()) {
      c10::DataPtr at(reach(storage->data()), Device(DeviceType::CPU));
      c10::Storage twin({}, storage->nbytes(), std::move(at), c10::GetAllocator(DeviceType::CPU), true);
      if (storage->data() != nullptr) owners.emplace(twin.data(), tensor.storage());
      found = storages.emplace(storage, twin).first;
    }
    Tensor twin = like(found->second, DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
    return twin;
  }

  bool is_new(const Tensor& twin) const { return owners.find(twin.storage().data()) == owners.end(); }

  Tensor on_device(const Tensor& twin) {
    auto found = owners.find(twin.storage().data());
    return like(found == owners.end() ? copied(twin.storage()) : found->second, DispatchKey::CUDA, twin);
  }

  std::vector<Tensor> resize_written() {  // as the operation did with what it was given for results; returns those
    std::vector<Tensor> resized;
    for (auto& [tensor, twin] : written) {
      if (tensor.sizes() == twin.sizes() && tensor.strides() == twin.strides()) continue;
      if (twin.storage().data() != reach(tensor.storage().data())) {
        c10::Storage larger = copied(twin.storage());
        auto* storage = tensor.storage().unsafeGetStorageImpl();
        storage->set_nbytes(larger.nbytes());
        storage->set_data_ptr_noswap(larger.set_data_ptr({}));
      }
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
      resized.push_back(tensor);
    }
    return resized;
  }

 private:
  static Tensor like(c10::Storage storage, DispatchKey key, const Tensor& other) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), other.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
    return made;
  }

  static c10::Storage copied(const c10::Storage& twin) {
    c10::Storage made({}, twin.nbytes(), allocator.allocate(twin.nbytes()), &allocator, true);
    if (twin.nbytes() > 0) memcpy(reach(made.data()), twin.data(), twin.nbytes());
    return made;
  }
};

template <typename Convert>
void convert_tensors(c10::IValue& value, const Convert& convert) {
  if (value.isTensor()) {
    value = convert(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(convert(tensor));
    value = c10::List<Tensor>(made);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      made.push_back(tensor.has_value() ? std::optional(convert(*tensor)) : tensor);
    value = made;
  }
}

const std::set<std::string> TAKE_INDICES_OF_THE_CPU = {"aten::index", "aten::_index_put_impl_"};
const std::set<std::string> RETURN_WHEN_DONE = {
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::masked_select", "aten::nonzero",
    "aten::_unique2",
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  auto arguments = stack->end() - schema.arguments().size();
  const std::vector<c10::IValue> given(arguments, stack->end());  // freed without the mutex: that may take the GIL
  Twins twins;
  {
    Locked locked(mutex);
    issue();
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      bool writes = alias != nullptr && alias->isWrite();
      if (arguments[i].isDevice()) arguments[i] = Device(DeviceType::CPU);
      convert_tensors(arguments[i], [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (!tensor.is_cuda()) {
          bool may = tensor.dim() == 0 || TAKE_INDICES_OF_THE_CPU.count(name) > 0;
          TORCH_CHECK(may, "Expected all tensors to be on the same device, but found cuda:0 and cpu! (", name, ")");
          return tensor;
        }
        access(tensor, writes, name);
        Tensor twin = twins.on_cpu(tensor);
        if (writes) twins.written.emplace_back(tensor, twin);
        return twin;
      });
    }
    if (RETURN_WHEN_DONE.count(name) > 0) {
      learn(host, clocks[current]);
      ++counts[name];
    }
  }
  op.callBoxedForDispatchKey(DispatchKey::CPU, *stack);
  Locked locked(mutex);
  learn(clocks[current], host);  // what results lie in may have been freed since the operation was issued
  for (const Tensor& tensor : twins.resize_written()) access(tensor, true, name);
  for (auto result = stack->end() - schema.returns().size(); result != stack->end(); ++result) {
    convert_tensors(*result, [&](const Tensor& twin) {
      if (!twin.defined()) return twin;
      for (auto& [tensor, its_twin] : twins.written)
        if (its_twin.is_same(twin)) return tensor;
      Tensor made = twins.on_device(twin);
      if (twins.is_new(twin)) access(made, true, name);
      return made;
    });
  }
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel() == 0) return to;
  Twins twins;
  {
    Locked locked(mutex);
    issue();
    access(from, false, "copy_");
    access(to, true, "copy_");
    if (to.device() != from.device()) {
      std::string kind = to.is_cuda() ? "h2d" : "d2h";
      const Tensor& ram = to.is_cuda() ? from : to;
      bool by_itself = is_pinned(ram.const_data_ptr(), ram.nbytes());
      ++counts[kind + (!non_blocking ? " that waits" : by_itself ? "" : " of RAM that is not pinned")];
      if (!non_blocking) learn(host, clocks[current]);
    }
  }
  Tensor target = to.is_cuda() ? twins.on_cpu(to) : to, source = from.is_cuda() ? twins.on_cpu(from) : from;
  at::AutoDispatchBelowAutograd below;
  target.copy_(source);
  return to;
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t nbytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (nbytes > storage->nbytes()) {
    auto larger = allocator.allocate(nbytes);
    if (storage->nbytes() > 0) memcpy(reach(larger.get()), reach(storage->data()), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

void record_stream(Tensor&, Stream) {
  TORCH_CHECK(false, "record_stream: nobody knows how much later the memory can be used again");
}

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                        std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", copy_);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, c10::Storage)>(at::native::set_));
}

// --- for Python ------------------------------------------------------------------------------------------------------

void kernel(const std::vector<Tensor>& read, const std::vector<Tensor>& written, const std::string& name) {
  static std::set<std::string> names;  // accesses keep views of them
  Locked locked(mutex);
  const std::string& kept = *names.insert(name).first;
  issue();
  for (const auto* tensors : {&read, &written})
    for (const Tensor& tensor : *tensors) {
      TORCH_CHECK(tensor.is_cuda(), name, " was given memory of the CPU");
      access(tensor, tensors == &written, kept);
    }
}

int64_t record(int64_t event, int stream) {
  Locked locked(mutex);
  if (event == 0) event = next_event++;
  learn(clocks[stream], host);
  events[event] = clocks[stream];
  return event;
}

template <typename T>
auto taking(T& what) {
  return [&what] {
    Locked locked(mutex);
    return std::exchange(what, T{});
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  map_memory();
  c10::SetAllocator(DeviceType::CUDA, &allocator, 100);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention);
  // Without the GIL: who holds the mutex may need it, to let go of a tensor that Python knows.
  auto define = [&](const char* name, auto function) {
    m.def(name, function, py::call_guard<py::gil_scoped_release>());
  };
  m.attr("DEVICE_BYTES") = DEVICE_BYTES;
  define("new_stream", [] { Locked locked(mutex); return 1 + next_stream++ % (STREAMS - 1); });
  define("current_stream", [] { return current; });
  define("set_current_stream", [](int stream) { return std::exchange(current, stream); });
  define("wait_for_stream", &wait_for_stream);
  define("wait_for_device", &wait_for_device);
  define("record", &record);
  define("stream_waits", [](int stream, int64_t event) { Locked locked(mutex); learn(clocks[stream], events[event]); });
  define("host_waits", [](int64_t event) { Locked locked(mutex); learn(host, events[event]); });
  define("forget", [](int64_t event) { Locked locked(mutex); events.erase(event); });
  define("pin", &pin);
  define("most_pinned", [](size_t nbytes) { Locked locked(mutex); return std::exchange(most_pinned, nbytes); });
  define("pinned", [] { Locked locked(mutex); return pinned.size(); });
  define("unpin", [](uintptr_t at) { Locked locked(mutex); pinned.erase(at); });
  define("allocated", [] { Locked locked(mutex); return allocated; });
  define("handed_out", [] { Locked locked(mutex); return handed_out; });
  define("reach", [](uintptr_t at) { return reinterpret_cast<uintptr_t>(reach(reinterpret_cast<void*>(at))); });
  define("kernel", &kernel);
  define("take_races", taking(races));
  define("take_counts", taking(counts));
}

extern "C" int cudaGetLastError() { return std::exchange(last_error, 0); }
