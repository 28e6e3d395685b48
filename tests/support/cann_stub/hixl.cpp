// HIXL (libllm_datadist), with which mooncake's engine moves bytes, over host memory: an engine's
// name leads to a file with its process and its registered memory, and the kernel copies between
// processes. HIXL's rules hold: memory is page-aligned, there are at most 256 regions, and a link
// knows the memory that was registered on both ends when it came up. An engine listens on the port
// in its name; otherwise mooncake's search for a free port could give two engines the same name.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ge {
class AscendString {
   public:
    AscendString() = default;
    AscendString(const char *text);
    bool operator<(const AscendString &other) const;
    const char *GetString() const;

   private:
    std::shared_ptr<std::string> text_;
};
AscendString::AscendString(const char *text) : text_(std::make_shared<std::string>(text)) {}
bool AscendString::operator<(const AscendString &other) const {
    return std::strcmp(GetString(), other.GetString()) < 0;
}
const char *AscendString::GetString() const { return text_ ? text_->c_str() : ""; }
}  // namespace ge

namespace adxl {
using Status = uint32_t;
using AscendString = ge::AscendString;
using MemHandle = void *;
constexpr Status SUCCESS = 0, PARAM_INVALID = 103900, NOT_CONNECTED = 103902,
                 ALREADY_CONNECTED = 103903, FAILED = 503900;
constexpr size_t PAGE = 2 << 20, MAX_REGIONS = 256;

enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
struct MemDesc {
    uintptr_t addr;
    size_t len;
    uint8_t reserved[128];
};
struct TransferOpDesc {
    uintptr_t local_addr;
    uintptr_t remote_addr;
    size_t len;
};

namespace {
using Regions = std::map<uintptr_t, size_t>;

struct Published {
    pid_t process = 0;
    Regions regions;
};

std::string file_of(const std::string &name) {
    const char *folder = std::getenv("CANN_STUB_FOLDER");
    return std::string(folder ? folder : "/tmp") + "/hixl-" + name;
}

bool read_published(const std::string &name, Published *found) {
    std::ifstream file(file_of(name));
    if (!(file >> found->process)) return false;
    uintptr_t address;
    size_t nbytes;
    while (file >> address >> nbytes) found->regions[address] = nbytes;
    return true;
}

bool holds(const Regions &regions, uintptr_t address, size_t nbytes) {
    auto after = regions.upper_bound(address);
    if (after == regions.begin()) return false;
    auto region = std::prev(after);
    return address + nbytes <= region->first + region->second;
}

// Listens on the port of "address:port"; -1 if the port is in use.
int hold_port(const std::string &name) {
    size_t colon = name.rfind(':');
    if (colon == std::string::npos) return -1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)std::atoi(name.c_str() + colon + 1));
    if (inet_pton(AF_INET, name.substr(0, colon).c_str(), &address.sin_addr) != 1) return -1;
    int held = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(held, (sockaddr *)&address, sizeof address) || listen(held, 1)) {
        close(held);
        return -1;
    }
    return held;
}

bool copy(pid_t process, TransferOp operation, const TransferOpDesc &piece) {
    for (size_t done = 0; done < piece.len;) {
        iovec here = {(void *)(piece.local_addr + done), piece.len - done};
        iovec there = {(void *)(piece.remote_addr + done), piece.len - done};
        ssize_t moved = operation == READ ? process_vm_readv(process, &here, 1, &there, 1, 0)
                                          : process_vm_writev(process, &here, 1, &there, 1, 0);
        if (moved <= 0) return false;
        done += (size_t)moved;
    }
    return true;
}
}  // namespace

struct State {
    std::string name;
    Regions regions;
    std::map<std::string, std::pair<Regions, Published>> links;
    bool connects_by_itself = false;
    int port = -1;  // the listening socket
    std::mutex lock;

    void publish() {
        std::string partial = file_of(name) + ".partial";
        std::ofstream file(partial);
        file << getpid() << "\n";
        for (auto &[address, nbytes] : regions) file << address << " " << nbytes << "\n";
        file.close();
        std::rename(partial.c_str(), file_of(name).c_str());
    }
};

class AdxlEngine {
   public:
    AdxlEngine();
    ~AdxlEngine();
    Status Initialize(
        const AscendString &name, const std::map<AscendString, AscendString> &options);
    void Finalize();
    Status RegisterMem(const MemDesc &memory, MemType type, MemHandle &handle);
    Status DeregisterMem(MemHandle handle);
    Status Connect(const AscendString &remote, int32_t timeout_ms);
    Status Disconnect(const AscendString &remote, int32_t timeout_ms);
    Status TransferSync(
        const AscendString &remote,
        TransferOp operation,
        const std::vector<TransferOpDesc> &pieces,
        int32_t timeout_ms);

   private:
    State *state_;
};

AdxlEngine::AdxlEngine() : state_(new State) {}
AdxlEngine::~AdxlEngine() {
    Finalize();
    delete state_;
}

Status AdxlEngine::Initialize(
    const AscendString &name, const std::map<AscendString, AscendString> &options) {
    auto option = options.find("AutoConnect");
    state_->connects_by_itself =
        option != options.end() && !std::strcmp(option->second.GetString(), "1");
    state_->port = hold_port(name.GetString());
    if (state_->port < 0) return FAILED;
    state_->name = name.GetString();
    state_->publish();
    return SUCCESS;
}

void AdxlEngine::Finalize() {
    std::lock_guard<std::mutex> held(state_->lock);
    if (!state_->name.empty()) std::remove(file_of(state_->name).c_str());
    state_->name.clear();
    if (state_->port >= 0) close(state_->port);
    state_->port = -1;
}

Status AdxlEngine::RegisterMem(const MemDesc &memory, MemType type, MemHandle &handle) {
    std::lock_guard<std::mutex> held(state_->lock);
    if (!memory.len || memory.addr % PAGE || state_->regions.size() >= MAX_REGIONS) {
        return PARAM_INVALID;
    }
    state_->regions[memory.addr] = memory.len;
    state_->publish();
    handle = (MemHandle)memory.addr;
    return SUCCESS;
}

Status AdxlEngine::DeregisterMem(MemHandle handle) {
    std::lock_guard<std::mutex> held(state_->lock);
    if (!state_->regions.erase((uintptr_t)handle)) return PARAM_INVALID;
    state_->publish();
    return SUCCESS;
}

Status AdxlEngine::Connect(const AscendString &remote, int32_t timeout_ms) {
    std::lock_guard<std::mutex> held(state_->lock);
    if (state_->links.count(remote.GetString())) return ALREADY_CONNECTED;
    Published other;
    if (!read_published(remote.GetString(), &other)) return FAILED;
    state_->links[remote.GetString()] = {state_->regions, other};
    return SUCCESS;
}

Status AdxlEngine::Disconnect(const AscendString &remote, int32_t timeout_ms) {
    std::lock_guard<std::mutex> held(state_->lock);
    return state_->links.erase(remote.GetString()) ? SUCCESS : NOT_CONNECTED;
}

Status AdxlEngine::TransferSync(
    const AscendString &remote,
    TransferOp operation,
    const std::vector<TransferOpDesc> &pieces,
    int32_t timeout_ms) {
    if (state_->connects_by_itself) Connect(remote, timeout_ms);
    std::unique_lock<std::mutex> held(state_->lock);
    auto link = state_->links.find(remote.GetString());
    if (link == state_->links.end()) return NOT_CONNECTED;
    auto [local, other] = link->second;
    held.unlock();
    Published now;
    Status status = read_published(remote.GetString(), &now) ? SUCCESS : FAILED;
    for (size_t at = 0; at < pieces.size() && status == SUCCESS; at++) {
        const auto &piece = pieces[at];
        if (!holds(local, piece.local_addr, piece.len) ||
            !holds(other.regions, piece.remote_addr, piece.len) ||
            !holds(now.regions, piece.remote_addr, piece.len)) {
            status = PARAM_INVALID;
        } else if (!copy(now.process, operation, piece)) {
            status = FAILED;
        }
    }
    if (status != SUCCESS && state_->connects_by_itself) Disconnect(remote, timeout_ms);
    return status;
}
}  // namespace adxl
