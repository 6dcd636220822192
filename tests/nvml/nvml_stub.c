/* A stand-in for NVIDIA's management library, libnvidia-ml.so.1, that says what a text tells it to.
 *
 * With it every case of a machine can be tested where there is no GPU: no driver, a driver too old, several GPUs, a busy
 * one. It knows what nvidia-ml-py (pynvml) asks; a function that is not here is "Function Not Found" there.
 *
 * NVML_STUB holds the state, or the absolute path of a file with it; without NVML_STUB the file is /run/nvml-stub.conf.
 * It is read at each nvmlInit. Lines end with a newline or `;`, and `#` begins a comment:
 *
 *     driver 550.54.14
 *     cuda 12040                      what the driver can run at most; 1000 * major + 10 * minor
 *     gpu 81559 1024 8.0 NVIDIA A100-SXM4-80GB      MiB in all, MiB in use, compute capability, name
 *     gpu - - 12.1 NVIDIA GB10        `-` for what the driver does not tell: memory, or capability
 *     utilization 97                  of the last GPU, in percent
 *     reserved 512                    of the MiB in use of the last GPU, those of the driver
 *     processes 2                     that compute on the last GPU
 *     mig 1                           the last GPU is divided into slices
 *     error driver-not-loaded         nvmlInit fails with this: see `errors`
 *
 * No state, as on a machine without the driver: driver-not-loaded. A line that is not understood is named on stderr and
 * makes nvmlInit fail as "unknown", so that no test goes on with half of what it asked for.
 *
 * Only libc's oldest functions are used, and -std=c99 keeps newer glibc headers from renaming them: the library loads
 * with the glibc of every image, whatever built it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define MAX_GPUS 32
#define MAX_TEXT 16384
#define MIB (1024ULL * 1024ULL)
#define DEFAULT_FILE "/run/nvml-stub.conf"

/* nvmlReturn_t */
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    UNKNOWN = 999
};

static const struct {
    const char *name;
    int code;
    const char *text;
} errors[] = {
    {"", SUCCESS, "The operation was successful"},
    {"uninitialized", UNINITIALIZED, "Uninitialized"},
    {"invalid-argument", INVALID_ARGUMENT, "Invalid Argument"},
    {"not-supported", NOT_SUPPORTED, "Not Supported"},
    {"no-permission", NO_PERMISSION, "Insufficient Permissions"},
    {"not-found", NOT_FOUND, "Not Found"},
    {"insufficient-size", INSUFFICIENT_SIZE, "Insufficient Size"},
    {"driver-not-loaded", DRIVER_NOT_LOADED, "Driver Not Loaded"},
    {"gpu-is-lost", GPU_IS_LOST, "GPU is lost"},
    {"version-mismatch", LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch"},
    {"unknown", UNKNOWN, "Unknown Error"},
};

struct gpu {
    int has_memory, has_capability;
    unsigned long long total, used, reserved; /* MiB */
    int major, minor;
    unsigned int utilization, processes, mig;
    char name[96];
};

static struct {
    int started; /* nvmlInit less nvmlShutdown */
    int error;
    int cuda;
    char driver[80];
    unsigned int count;
    struct gpu gpus[MAX_GPUS];
} state;

/* The next word of a line, ended by a zero; NULL at its end. */
static char *word(char **rest) {
    char *begin = *rest + strspn(*rest, " \t\r"), *end;
    if (*begin == '\0')
        return NULL;
    end = begin + strcspn(begin, " \t\r");
    *rest = *end ? end + 1 : end;
    *end = '\0';
    return begin;
}

/* What is left of a line, without blanks around it. */
static char *remainder_of(char *rest) {
    size_t length;
    rest += strspn(rest, " \t\r");
    for (length = strlen(rest); length && strchr(" \t\r", rest[length - 1]); length--)
        rest[length - 1] = '\0';
    return rest;
}

static int number(const char *text, unsigned long long *value) {
    char *end;
    if (text == NULL || *text < '0' || *text > '9')
        return 0;
    *value = strtoull(text, &end, 10);
    return *end == '\0';
}

static int store(char *to, size_t size, const char *text) {
    if (text == NULL || *text == '\0' || strlen(text) >= size)
        return 0;
    strcpy(to, text);
    return 1;
}

static int read_gpu(char *rest) {
    struct gpu *gpu = &state.gpus[state.count];
    char *total = word(&rest), *used = word(&rest), *capability = word(&rest), *point;
    unsigned long long major, minor;
    if (capability == NULL || state.count == MAX_GPUS)
        return 0;
    memset(gpu, 0, sizeof *gpu);
    if (strcmp(total, "-") != 0) {
        if (!number(total, &gpu->total) || !number(used, &gpu->used) || gpu->used > gpu->total)
            return 0;
        gpu->has_memory = 1;
    }
    if (strcmp(capability, "-") != 0) {
        if ((point = strchr(capability, '.')) == NULL)
            return 0;
        *point = '\0';
        if (!number(capability, &major) || !number(point + 1, &minor))
            return 0;
        gpu->major = (int)major, gpu->minor = (int)minor, gpu->has_capability = 1;
    }
    state.count++;
    return store(gpu->name, sizeof gpu->name, remainder_of(rest));
}

static int read_line(char *line) {
    char *key, *rest = line;
    unsigned long long value;
    size_t one;
    line[strcspn(line, "#")] = '\0';
    if ((key = word(&rest)) == NULL)
        return 1;
    if (strcmp(key, "gpu") == 0)
        return read_gpu(rest);
    rest = remainder_of(rest);
    if (strcmp(key, "driver") == 0)
        return store(state.driver, sizeof state.driver, rest);
    if (strcmp(key, "cuda") == 0 && number(rest, &value)) {
        state.cuda = (int)value;
        return 1;
    }
    if (strcmp(key, "utilization") == 0 && number(rest, &value) && state.count) {
        state.gpus[state.count - 1].utilization = (unsigned int)value;
        return 1;
    }
    if (state.count && number(rest, &value)) {
        struct gpu *gpu = &state.gpus[state.count - 1];
        if (strcmp(key, "reserved") == 0 && value <= gpu->used)
            return gpu->reserved = value, 1;
        if (strcmp(key, "processes") == 0)
            return gpu->processes = (unsigned int)value, 1;
        if (strcmp(key, "mig") == 0)
            return gpu->mig = (unsigned int)value, 1;
    }
    for (one = 1; strcmp(key, "error") == 0 && one < sizeof errors / sizeof *errors; one++)
        if (strcmp(rest, errors[one].name) == 0) {
            state.error = errors[one].code;
            return 1;
        }
    return 0;
}

static int read_state(void) {
    static char text[MAX_TEXT];
    char shown[120];
    const char *told = getenv("NVML_STUB");
    char *line, *end;
    memset(&state, 0, sizeof state);
    if (told == NULL || *told == '\0')
        told = DEFAULT_FILE;
    if (*told == '/') {
        FILE *file = fopen(told, "r");
        if (file == NULL)
            return DRIVER_NOT_LOADED;
        text[fread(text, 1, sizeof text - 1, file)] = '\0';
        fclose(file);
    } else if (!store(text, sizeof text, told)) {
        return UNKNOWN;
    }
    for (line = text; *line; line = end) {
        end = line + strcspn(line, "\n;");
        if (*end)
            *end++ = '\0';
        shown[0] = '\0';
        strncat(shown, line, sizeof shown - 1);
        if (!read_line(line)) {
            fprintf(stderr, "nvml stub: not understood: %s\n", shown);
            return UNKNOWN;
        }
    }
    if (state.error == SUCCESS && state.driver[0] == '\0')
        return DRIVER_NOT_LOADED;
    return state.error;
}

static int text_out(char *to, unsigned int size, const char *text) {
    if (to == NULL)
        return INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* Each function of a device begins so. */
#define DEVICE(handle)                                                             \
    struct gpu *gpu = (handle);                                                    \
    if (!state.started)                                                            \
        return UNINITIALIZED;                                                      \
    if (gpu < state.gpus || gpu >= state.gpus + state.count)                       \
        return INVALID_ARGUMENT;

API int nvmlInitWithFlags(unsigned int flags) {
    int result;
    (void)flags;
    if (state.started) {
        state.started++;
        return SUCCESS;
    }
    result = read_state();
    if (result == SUCCESS)
        state.started = 1;
    return result;
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API int nvmlInit(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void) {
    if (!state.started)
        return UNINITIALIZED;
    state.started--;
    return SUCCESS;
}

API const char *nvmlErrorString(int code) {
    size_t one;
    for (one = 0; one < sizeof errors / sizeof *errors; one++)
        if (errors[one].code == code)
            return errors[one].text;
    return "Unknown Error";
}

API int nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    return state.started ? text_out(version, size, state.driver) : UNINITIALIZED;
}

API int nvmlSystemGetNVMLVersion(char *version, unsigned int size) {
    char text[96] = "12.";
    return state.started ? text_out(version, size, strcat(text, state.driver)) : UNINITIALIZED;
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    if (!state.started)
        return UNINITIALIZED;
    if (!state.cuda)
        return NOT_SUPPORTED;
    *version = state.cuda;
    return SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

API int nvmlDeviceGetCount_v2(unsigned int *count) {
    if (!state.started)
        return UNINITIALIZED;
    *count = state.count;
    return SUCCESS;
}

API int nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct gpu **device) {
    if (!state.started)
        return UNINITIALIZED;
    if (index >= state.count)
        return INVALID_ARGUMENT;
    *device = &state.gpus[index];
    return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex(unsigned int index, struct gpu **device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

API int nvmlDeviceGetIndex(struct gpu *device, unsigned int *index) {
    DEVICE(device)
    *index = (unsigned int)(gpu - state.gpus);
    return SUCCESS;
}

API int nvmlDeviceGetName(struct gpu *device, char *name, unsigned int size) {
    DEVICE(device)
    return text_out(name, size, gpu->name);
}

API int nvmlDeviceGetUUID(struct gpu *device, char *uuid, unsigned int size) {
    char text[64];
    DEVICE(device)
    sprintf(text, "GPU-57ab0000-0000-0000-0000-%012d", (int)(gpu - state.gpus));
    return text_out(uuid, size, text);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **device) {
    char text[64];
    unsigned int index;
    if (!state.started)
        return UNINITIALIZED;
    for (index = 0; index < state.count; index++) {
        nvmlDeviceGetUUID(&state.gpus[index], text, sizeof text);
        if (strcmp(text, uuid) == 0) {
            *device = &state.gpus[index];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

struct memory {
    unsigned long long total, free, used;
};

API int nvmlDeviceGetMemoryInfo(struct gpu *device, struct memory *memory) {
    DEVICE(device)
    if (!gpu->has_memory)
        return NOT_SUPPORTED;
    memory->total = gpu->total * MIB, memory->used = gpu->used * MIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

API int nvmlDeviceGetMemoryInfo_v2(struct gpu *device, struct memory_v2 *memory) {
    struct memory plain;
    int result = nvmlDeviceGetMemoryInfo(device, &plain);
    if (memory->version != (sizeof *memory | 2 << 24))
        return INVALID_ARGUMENT;
    if (result == SUCCESS) {
        memory->total = plain.total, memory->free = plain.free;
        memory->reserved = device->reserved * MIB, memory->used = plain.used - memory->reserved;
    }
    return result;
}

API int nvmlDeviceGetCudaComputeCapability(struct gpu *device, int *major, int *minor) {
    DEVICE(device)
    if (!gpu->has_capability)
        return NOT_SUPPORTED;
    *major = gpu->major, *minor = gpu->minor;
    return SUCCESS;
}

struct utilization {
    unsigned int gpu, memory; /* percent of the last second */
};

API int nvmlDeviceGetUtilizationRates(struct gpu *device, struct utilization *rates) {
    DEVICE(device)
    rates->gpu = gpu->utilization;
    rates->memory = gpu->total ? (unsigned int)(100 * gpu->used / gpu->total) : 0;
    return SUCCESS;
}

// What Jupyter's view of the GPUs asks at its start.
API int nvmlDeviceGetMaxPcieLinkGeneration(struct gpu *device, unsigned int *generation) {
    DEVICE(device)
    *generation = 5;
    return SUCCESS;
}

API int nvmlDeviceGetNvLinkVersion(struct gpu *device, unsigned int link, unsigned int *version) {
    DEVICE(device)
    (void)link, (void)version;
    return NOT_SUPPORTED;
}

struct pci {
    char legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char id[32];
};

API int nvmlDeviceGetPciInfo_v3(struct gpu *device, struct pci *pci) {
    DEVICE(device)
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned int)(gpu - state.gpus) + 1;
    sprintf(pci->legacy, "0000:%02X:00.0", pci->bus);
    sprintf(pci->id, "00000000:%02X:00.0", pci->bus);
    return SUCCESS;
}

API int nvmlDeviceGetMigMode(struct gpu *device, unsigned int *current, unsigned int *pending) {
    DEVICE(device)
    if (!gpu->mig)
        return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *device, unsigned int *count, void *processes) {
    DEVICE(device)
    (void)processes;
    int result = *count < gpu->processes ? INSUFFICIENT_SIZE : SUCCESS;
    *count = gpu->processes;
    return result;
}
