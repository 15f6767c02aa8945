# Every command of this project. `make` alone lists them.
# The Makefile stays outside layer.nw because tangling would expand its tabs.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
.SECONDARY:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
export LC_ALL := C

# ---------------------------------------------------------------- the web's files
# The files that layer.nw tangles into, one and all: `make tangle` refuses a web whose
# root chunks are not exactly these, for a misspelled chunk name is one more root.
WEB_STAGES := 0 1 2 3 4 5 6 7 8
ROOTS := \
  $(addprefix stages/oracle/,oracle.h oracle.c) \
  $(addprefix stages/cpu/,cuda_runtime_api.h device.h cpu.c selftest.cu selftest.c) \
  $(foreach n,$(WEB_STAGES),$(addprefix stages/stage$n/,layer.h layer.c kernels.cu probes.cu driver.c)) \
  stages/stage7/queue.cu stages/stage7/submission.py stages/stage8/submission.py

# What is built is whatever folders there are; layer.nw is not asked.
STAGES_HERE := $(patsubst stages/stage%/,%,$(sort $(wildcard stages/stage?/)))

# Targets named on the command line that must come before the others, also under -j.
FIRST = $(filter clean deps deps-paper tangle,$(MAKECMDGOALS))

# ---------------------------------------------------------------- help
.PHONY: help
help:
	@echo 'make deps         install what tangling, building and testing need (Debian packages)'
	@echo 'make deps-paper   install gnuplot and TeX, which only the document needs'
	@echo 'make tangle       layer.nw -> stages/'
	@for n in $(STAGES_HERE); do \
	    echo "make stage$$n       build stage $$n and run it: on the GPU if there is one, else on the CPU"; \
	done
	@echo '                  D= FFN= NQ= NKV= HD= PREFILL= choose another shape, SEED= other inputs,'
	@echo '                  DEBUG=1 kernels whose waits are bounded and name what they wait for;'
	@echo '                  TWIN=1 with stage8: the same arithmetic from raw weights, for the same bits'
	@echo 'make grade        all gates of the contract on a GPU -> data/grade.json; SUBMISSION= another file, TO= elsewhere'
	@echo 'make ladder       measures all stages in one run on a GPU -> data/ladder.csv; STAGES="0 5 7" some'
	@echo 'make shapes       measures stage 7 on other layers of the Llama family -> data/shapes.csv;'
	@echo '                  ONLY="70b mistral" some'
	@echo 'make traffic      bytes read and written by stages 4 and 5, by the hardware counters'
	@echo 'make peers        measures PyTorch and the cuBLAS products beside stage 7 -> data/peers.csv'
	@echo 'make queue        what a load costs beside the stream, by bytes in flight -> data/queue.csv'
	@echo 'make exponents    how weights use their exponents -> data/exponents.csv; needs no GPU'
	@echo 'make resources    registers, spills and code of every kernel -> data/resources.csv; needs nvcc, no GPU'
	@echo 'make timeline     when each multiprocessor worked on which phase -> data/timeline-N.csv; N=7 one stage'
	@echo 'make plots        data/ -> the figures in plots/, and the table in README.md; needs no GPU'
	@echo 'make weave        layer.nw -> paper/layer.pdf'
	@echo 'make check        all tests; those that need a GPU are skipped where there is none'
	@echo 'make check-gpu    those that need a GPU, alone -> data/check-gpu.txt'
	@echo 'make sanitize     compute-sanitizer on stage 7, on a GPU -> data/sanitize.txt'
	@echo 'make fuzz         random input for what reads text, random shapes for stage 7; SECONDS=600'
	@echo 'make mutants      plants single faults in stages 6 to 8 and says which of them the CPU runs catch'
	@echo 'make dist         build/layer-VERSION.tar.gz: sources, tangled files, document, data'
	@echo 'make clean        remove build/'

# ---------------------------------------------------------------- deps
# A Python that has what reference.py and the tests import; it need not be the first on PATH.
PYTHON_NEEDS := torch, numpy, pytest, xdist
find_python = for p in python3 /usr/bin/python3; do \
    if "$$p" -c 'import $(PYTHON_NEEDS)' >/dev/null 2>&1; then command -v "$$p"; break; fi; done
ifndef PYTHON
PYTHON = $(eval PYTHON := $$(shell $$(find_python)))$(PYTHON)
endif

# $(call install,A TEST PACKAGES LINE EACH): a shell script that installs the packages of
# those lines whose test fails, and touches neither apt nor the network when none does.
define install
missing=""; \
need() { missing="$$missing $$*"; }; \
have() { command -v "$$1" >/dev/null 2>&1; }; \
$(1) \
missing="$${missing# }"; \
if [ -z "$$missing" ]; then echo "$@: nothing is missing"; exit 0; fi; \
line="apt-get update && apt-get install -y --no-install-recommends $$missing"; \
if ! have apt-get; then \
    echo "$@: this is no Debian (there is no apt-get); please install what these packages hold: $$missing"; exit 1; \
fi; \
if [ "$$(id -u)" = 0 ]; then root=env; \
elif sudo -n true 2>/dev/null; then root="sudo env"; \
else echo "$@: this needs an administrator's rights; please have this line run:"; echo "  $$line"; exit 1; fi; \
echo "$@: installing $$missing"; \
lock="-o DPkg::Lock::Timeout=600"; \
$$root apt-get $$lock -q update </dev/null || echo "$@: apt-get update failed; going on with the lists at hand"; \
$$root DEBIAN_FRONTEND=noninteractive apt-get $$lock -q -y --no-install-recommends install $$missing </dev/null
endef

.PHONY: deps
deps: | $(filter clean,$(FIRST))
	@$(call install, \
	    have notangle || need noweb; \
	    { have gcc && echo '#include <stdio.h>' | gcc -E - >/dev/null 2>&1; } || need gcc libc6-dev; \
	    have make || need make; \
	    have git || need git; \
	    [ -e /usr/share/i18n/locales/de_DE ] || need locales; \
	    [ -n "$$($(find_python))" ] || need python3-torch python3-numpy python3-pytest python3-pytest-xdist;)
	@[ -n "$$($(find_python))" ] || { \
	    echo "deps: no Python here can import $(PYTHON_NEEDS)"; exit 1; }

.PHONY: deps-paper
deps-paper: | $(filter clean deps,$(FIRST))
	@$(call install, \
	    have noweave || need noweb; \
	    have python3 || need python3; \
	    have gnuplot || need gnuplot-nox; \
	    have latexmk || need latexmk; \
	    have pdftotext || need poppler-utils; \
	    tex() { have kpsewhich && kpsewhich "$$1" >/dev/null; }; \
	    tex lmodern.sty || need lmodern; \
	    { tex scrbook.cls && tex microtype.sty; } || need texlive-latex-recommended; \
	    tex mathpazo.sty || need texlive-latex-base; \
	    tex pplr8r.tfm || need texlive-fonts-recommended;)

# ---------------------------------------------------------------- tangle
# All roots are tangled aside first. Only if every one of them came out right are the files
# under stages/ replaced, and of those only the ones that changed, so that an edit of the
# prose alone rebuilds nothing. `make tangle LINE=-L` has compilers and debuggers speak of
# lines of layer.nw instead of lines of the tangled files.
LINE :=
T := build/tangle

.PHONY: tangle
tangle: | $(filter clean deps,$(FIRST))
	@command -v notangle >/dev/null || { echo "tangle: noweb is missing; make deps installs it"; exit 1; }
	@mkdir -p build; rm -rf $(T).new; mkdir $(T).new
	@noroots layer.nw | sed 's/^<<//; s/>>$$//' | sort > $(T).new/roots
	@printf '%s\n' $(sort $(ROOTS)) | sort > $(T).new/expected
	@if ! diff $(T).new/expected $(T).new/roots > $(T).new/difference; then \
	    sed -n -e 's/^< /tangle: layer.nw does not define /p' \
	           -e 's/^> /tangle: no chunk uses, and the Makefile does not list, /p' $(T).new/difference >&2; exit 1; fi
	@for root in $(ROOTS); do \
	    new=$(T).new/$$root; mkdir -p "$${new%/*}"; \
	    case $$root in *.py) open='#'; close='';; *) open='/*'; close=' */';; esac; \
	    if ! { printf '%s %s: tangled from layer.nw; change it there.%s\n' "$$open" "$$root" "$$close"; \
	           notangle $(if $(LINE),$(LINE),-filter "awk -v root=$$root -f paper/names.awk") \
	               -R"$$root" layer.nw; } > "$$new" 2> $(T).new/messages \
	       || [ -s $(T).new/messages ]; then \
	        sed "s|^|tangle: $$root: |" $(T).new/messages >&2; \
	        echo "tangle: nothing under stages/ was changed" >&2; exit 1; fi; \
	    done
	@changed=0; for root in $(ROOTS); do \
	    if ! cmp -s $(T).new/$$root $$root; then \
	        mkdir -p "$${root%/*}"; chmod 644 $(T).new/$$root; \
	        mv -f $(T).new/$$root $$root; echo "tangle: $$root"; changed=1; fi; \
	    done; \
	if [ $$changed = 0 ]; then echo "tangle: stages/ is what layer.nw says"; fi
	@rm -rf $(T).new

.PHONY: roots
roots:
	@printf '%s\n' $(ROOTS)

# ---------------------------------------------------------------- compilers
CC := gcc
CFLAGS := -std=c11 -Wall -Wextra -Werror -g

# A file of flags that changes only when they do, so that other flags mean a rebuild.
define remember
$(1): FORCE
	@mkdir -p $$(@D); printf '%s\n' '$(2)' | cmp -s - $$@ || printf '%s\n' '$(2)' > $$@
endef
.PHONY: FORCE
FORCE:

build/liboracle.so: stages/oracle/oracle.c stages/oracle/oracle.h
	@mkdir -p $(@D)
	@echo "  CC    $@"
	@$(CC) $(CFLAGS) -O2 -shared -fPIC -o $@.tmp $< -lm && mv -f $@.tmp $@

# ---------------------------------------------------------------- the CPU target
# Five builds: plain, which the tests also load as a library and may age; timers, with
# them compiled in; twin, in which stage 8 reads raw weights; asan, all of it under
# AddressSanitizer; tsan, in which only the kernels are instrumented, since the CPU target
# itself tells ThreadSanitizer what its primitives order.
BUILDS := plain asan tsan timers twin
CPU_FLAGS_plain := -O2 -fPIC -DAGEING
CPU_FLAGS_timers := -O2 -DTIMERS
CPU_FLAGS_twin := -O2 -DTWIN
CPU_FLAGS_asan  := -O1 -fno-omit-frame-pointer -fsanitize=address -DASAN
CPU_FLAGS_tsan  := -O1 -fno-omit-frame-pointer -DTSAN
KERNEL_FLAGS_tsan := -fsanitize=thread
LINK_FLAGS_asan := -fsanitize=address
LINK_FLAGS_tsan := -fsanitize=thread

# $(call cpu_build,BUILD)
define cpu_build
$(call remember,build/cpu/$(1)/flags,$(CC) $(CFLAGS) $(CPU_FLAGS_$(1)) $(KERNEL_FLAGS_$(1)))

build/cpu/$(1)/%.o: stages/%.c build/cpu/$(1)/flags
	@mkdir -p $$(@D)
	@echo "  CC    $$@"
	@$(CC) $(CFLAGS) $(CPU_FLAGS_$(1)) -Istages/cpu -MMD -MP -c -o $$@ $$<

build/cpu/$(1)/%.o: stages/%.cu build/cpu/$(1)/flags
	@mkdir -p $$(@D)
	@echo "  CC    $$@"
	@$(CC) -x c $(CFLAGS) $(CPU_FLAGS_$(1)) $(KERNEL_FLAGS_$(1)) -Istages/cpu -MMD -MP -c -o $$@ $$<

$(STAGES_HERE:%=build/cpu/$(1)/stage%/driver): build/cpu/$(1)/stage%/driver: \
    $(addprefix build/cpu/$(1)/stage%/,kernels.o probes.o layer.o driver.o) \
    build/cpu/$(1)/cpu/cpu.o build/cpu/$(1)/oracle/oracle.o
	@echo "  LINK  $$@"
	@$(CC) $(LINK_FLAGS_$(1)) -o $$@ $$(filter %.o,$$^) -lm
endef
$(foreach b,$(BUILDS),$(eval $(call cpu_build,$(b))))

$(STAGES_HERE:%=build/cpu/plain/stage%/liblayer.so): build/cpu/plain/stage%/liblayer.so: \
    $(addprefix build/cpu/plain/stage%/,kernels.o layer.o) build/cpu/plain/cpu/cpu.o
	@echo "  LINK  $@"
	@$(CC) -shared -Wl,-Bsymbolic -o $@.new $(filter %.o,$^) -lm && mv -f $@.new $@

# ---------------------------------------------------------------- the GPU
NVCC = $(eval NVCC := $$(firstword $$(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)))$(NVCC)
# The architecture of the device that is here; sm_90a where there is none.
ARCH = $(eval ARCH := $$(shell cc=$$$$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ' || true); \
    case $$$$cc in (''|*[!0-9]*|90) echo 90a;; (*) echo $$$$cc;; esac))$(ARCH)
G := build/gpu$(if $(DEBUG),-debug)$(if $(TIMERS),-timers)$(if $(TWIN),-twin)
GPU_FLAGS = -O3 -std=c++17 -gencode=arch=compute_$(ARCH),code=sm_$(ARCH) -lineinfo \
    -Werror all-warnings -Xcompiler -fPIC $(if $(DEBUG),-DDEBUG_SPINS) $(if $(TIMERS),-DTIMERS) $(if $(TWIN),-DTWIN)
GPU_HOST_FLAGS = -O2 -Xcompiler -std=c11,-Wall,-Wextra,-Werror,-fPIC,-g $(if $(TIMERS),-DTIMERS) $(if $(TWIN),-DTWIN)

$(G)/flags: FORCE
	@mkdir -p $(@D); printf '%s\n' '$(NVCC) $(GPU_FLAGS) $(GPU_HOST_FLAGS)' | cmp -s - $@ \
	    || printf '%s\n' '$(NVCC) $(GPU_FLAGS) $(GPU_HOST_FLAGS)' > $@

$(G)/%.o: stages/%.cu $(G)/flags
	@mkdir -p $(@D)
	@echo "  NVCC  $@"
	@$(NVCC) $(GPU_FLAGS) -MMD -MF $(@:.o=.d) -c -o $@ $<

$(G)/%.o: stages/%.c $(G)/flags
	@mkdir -p $(@D)
	@echo "  CC    $@"
	@$(NVCC) $(GPU_HOST_FLAGS) -MMD -MF $(@:.o=.d) -c -o $@ $<

$(STAGES_HERE:%=$(G)/stage%/driver): $(G)/stage%/driver: \
    $(addprefix $(G)/stage%/,kernels.o probes.o layer.o driver.o) $(G)/oracle/oracle.o
	@echo "  LINK  $@"
	@$(NVCC) -o $@ $(filter %.o,$^) -lm

$(G)/stage7/queue: $(G)/stage7/queue.o
	@echo "  LINK  $@"
	@$(NVCC) -o $@ $<

$(STAGES_HERE:%=$(G)/stage%/liblayer.so): $(G)/stage%/liblayer.so: $(addprefix $(G)/stage%/,kernels.o layer.o)
	@echo "  LINK  $@"
	@$(NVCC) -shared -o $@ $(filter %.o,$^)

-include $(wildcard $(G)/*/*.d $(BUILDS:%=build/cpu/%/*/*.d))

# ---------------------------------------------------------------- stageN
SHAPE = $(if $(D),--d=$(D)) $(if $(FFN),--ffn=$(FFN)) $(if $(NQ),--n-q=$(NQ)) $(if $(NKV),--n-kv=$(NKV)) \
    $(if $(HD),--hd=$(HD)) $(if $(PREFILL),--prefill=$(PREFILL)) $(if $(SEED),--seed=$(SEED))
gpu_is_here = nvidia-smi -L 2>/dev/null | grep -q '^GPU'

# Where a stage runs: gpu, or cpu with the reason, or nowhere.
WHERE = $(eval WHERE := $$(shell \
    if ! { $$(gpu_is_here); }; then echo cpu no NVIDIA GPU here; \
    elif [ -z '$$(NVCC)' ]; then echo cpu there is a GPU but no nvcc; \
    elif [ '$$(subst a,,$$(ARCH))' -lt 90 ]; then echo nowhere; \
    else echo gpu; fi))$(WHERE)
DRIVER = $(if $(filter gpu,$(WHERE)),$(G),build/cpu/$(if $(TWIN),twin,plain))/$@/driver

ALL_STAGES := $(addprefix stage,0 1 2 3 4 5 6 7 8)
.PHONY: $(ALL_STAGES)
$(ALL_STAGES): stage%: | $(FIRST)
	@[ -e stages/$@/driver.c ] || { \
	    echo "$@: there is no stages/$@; there is: $$(cd stages 2>/dev/null && ls -d stage* | xargs)"; exit 2; }
	@case '$(WHERE)' in \
	    cpu*) echo '$@: $(wordlist 2,99,$(WHERE)): the same kernels run on the CPU target, at small shapes';; \
	    nowhere) echo '$@: this GPU has compute capability $(ARCH); the kernels need 90 (Hopper) or later'; exit 2;; \
	    gpu) [ $(ARCH) = 90a ] || echo '$@: compute capability $(ARCH) is later than Hopper: never measured here';; \
	esac
	@$(MAKE) -s $(DRIVER)
	@$(if $(SEED),CPU_SEED=$(SEED)) $(DRIVER) $(SHAPE)

# What tables say they are of: COMMIT where it is given, for a tree that was copied without its
# history can have an older one beside it; else what git says.
commit = $${COMMIT:-$$(git describe --always --dirty=+ --abbrev=12 2>/dev/null || echo unknown)}

# ---------------------------------------------------------------- grade
# The grader's status is this recipe's: 0 all gates pass, 1 one does not, 2 no GPU. (make
# itself ends with 2 whatever a recipe fails with, and names the status in its last line.)
SUBMISSION := stages/stage7/submission.py
TO := data/grade.json
python_with_a_gpu = for p in '$(PYTHON)' python3 /usr/bin/python3; do \
    if [ -n "$$p" ] && "$$p" -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; then \
        command -v "$$p"; break; fi; done

.PHONY: grade
grade: | $(FIRST)
	@$(gpu_is_here) || { echo 'grade: no NVIDIA GPU here'; exit 2; }
	@if [ -n '$(NVCC)' ]; then $(MAKE) -s DEBUG= build/gpu/stage7/driver; \
	    else echo 'grade: no nvcc: the read-only limit is not measured'; fi
	@python=$$($(python_with_a_gpu)); \
	    [ -n "$$python" ] || { echo 'grade: no Python here has a PyTorch that can use the GPU'; exit 2; }; \
	    "$$python" reference.py grade '$(SUBMISSION)' --out '$(TO)'

# ---------------------------------------------------------------- ladder, peers, plots
# The status is measure.py's: 0 measured and written, 1 a check failed, 2 no GPU; whatever
# goes wrong, the old table stays. The read-only limit comes from stage 7's driver.
STAGES :=

# $(call measure,COMMAND AND OPTIONS,STAGES THAT MUST BE BUILT,OTHER FILES INSTEAD)
define measure
$(gpu_is_here) || { echo '$@: no NVIDIA GPU here'; exit 2; }; \
[ -n '$(NVCC)' ] || { echo '$@: there is a GPU but no nvcc'; exit 2; }; \
$(MAKE) -s DEBUG= $(or $(3),$(2:%=build/gpu/stage%/liblayer.so) build/gpu/stage7/driver); \
python=$$($(python_with_a_gpu)); \
[ -n "$$python" ] || { echo '$@: no Python here has a PyTorch that can use the GPU'; exit 2; }; \
"$$python" measure.py $(1)
endef

.PHONY: ladder peers plots exponents resources
ladder: | $(FIRST)
	@$(call measure,ladder $(if $(STAGES),--stages '$(STAGES)'),$(or $(STAGES),$(STAGES_HERE)))

peers: | $(FIRST) $(filter ladder,$(MAKECMDGOALS))
	@$(call measure,peers,7)

# Stage 7 on other layers: meant to take less than three minutes of an H200.
.PHONY: shapes
shapes: | $(FIRST) $(filter ladder peers,$(MAKECMDGOALS))
	@$(call measure,shapes $(if $(ONLY),--only '$(ONLY)'),7)

# What a load costs beside a stream, by bytes in flight: a program of its own.
.PHONY: queue
queue: | $(FIRST) $(filter ladder peers shapes,$(MAKECMDGOALS))
	@$(call measure,queue,,build/gpu/stage7/queue)

# WHEEL= a file instead of a download; where neither can be had the network is left out.
WHEEL :=
exponents: | $(FIRST)
	@$(python_is_here)
	@'$(PYTHON)' plots/exponents.py $(if $(WHEEL),--wheel '$(WHEEL)')

# For the card that the document measures, whatever is here.
resources: ARCH = 90a
resources: | $(FIRST)
	@[ -n '$(NVCC)' ] || { echo 'resources: there is no nvcc'; exit 2; }
	@command -v readelf >/dev/null || { echo 'resources: readelf is missing; make deps installs it'; exit 2; }
	@python3 plots/resources.py --nvcc '$(NVCC)' \
	    --commit "$(commit)" \
	    -- $(filter-out -lineinfo -Werror all-warnings -Xcompiler -fPIC,$(GPU_FLAGS))

# By ncu, on the drivers of the stages themselves.
.PHONY: traffic
traffic: | $(FIRST)
	@$(gpu_is_here) || { echo 'traffic: no NVIDIA GPU here'; exit 2; }
	@command -v ncu >/dev/null || { echo 'traffic: no ncu (Nsight Compute) here'; exit 2; }
	@$(MAKE) -s $(foreach n,4 5,build/gpu/stage$n/driver)
	@$(call measure,traffic,4 5)

# The stages that are one launch, compiled with timers: when each block worked on each phase.
N := 6 7 8
.PHONY: timeline
timeline: | $(FIRST)
	@$(gpu_is_here) || { echo 'timeline: no NVIDIA GPU here'; exit 2; }
	@[ -n '$(NVCC)' ] || { echo 'timeline: there is a GPU but no nvcc'; exit 2; }
	@$(MAKE) -s DEBUG= TIMERS=1 $(N:%=build/gpu-timers/stage%/driver)
	@ask() { nvidia-smi --format=csv,noheader --query-gpu="$$1" | head -n 1; }; \
	export DRIVER_VERSION="$$(ask driver_version)" \
	    CLOCKS="$$(ask clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem)" \
	    COMMIT="$(commit)"; \
	for n in $(N); do build/gpu-timers/stage$$n/driver --timeline=data/timeline-$$n.csv; done

plots: | $(filter shapes,$(MAKECMDGOALS))
plots: | $(FIRST) $(filter ladder peers timeline exponents,$(MAKECMDGOALS))
	@command -v gnuplot >/dev/null || { echo 'plots: gnuplot is missing; make deps-paper installs it'; exit 1; }
	@python3 plots/draw.py
	@python3 plots/tables.py README.md

# ---------------------------------------------------------------- weave
# The log is searched for what LaTeX only warns of: a line that is too long, a reference
# that leads nowhere.
P := build/paper
.PHONY: weave
weave: | $(FIRST)
	@command -v noweave latexmk >/dev/null || { echo "weave: noweb or TeX is missing; make deps-paper installs them"; exit 1; }
	@mkdir -p $(P)
	@python3 paper/numbers.py data > $(P)/numbers.tex
	@python3 paper/diagrams.py $(P)
	@sha256sum layer.nw | sed 's/^\([0-9a-f]*\).*/\\renewcommand{\\sourcedigest}{\1}/' > $(P)/digest.tex
	@if command -v gnuplot >/dev/null; then python3 plots/draw.py --paper $(P) --if-any; \
	    else echo 'weave: no gnuplot: the figures stay as they were'; fi
	@noweave -delay -index -filter 'awk -f paper/comments.awk' layer.nw > $(P)/layer.tex 2> $(P)/messages \
	    && [ ! -s $(P)/messages ] || { sed 's/^/weave: /' $(P)/messages; exit 1; }
	@cd $(P) && export TEXINPUTS=../../paper: BIBINPUTS=../../paper: SOURCE_DATE_EPOCH=0 && \
	    if ! latexmk -pdf -interaction=nonstopmode -halt-on-error layer.tex > latexmk.log 2>&1; then \
	        grep -A 4 '^!' layer.log || tail -n 30 latexmk.log; echo "weave: failed; see $(P)/layer.log"; exit 1; fi; \
	    if grep -A 3 -E '^Overfull .hbox|undefined (references|citations)|[Rr]eference .* undefined|Citation .* undefined|multiply defined' layer.log; then \
	        echo "weave: the above is wrong; see $(P)/layer.log"; exit 1; fi
	@cmp -s $(P)/layer.pdf paper/layer.pdf || cp $(P)/layer.pdf paper/layer.pdf
	@echo "weave: paper/layer.pdf, $$(pdfinfo paper/layer.pdf | sed -n 's/^Pages: *//p') pages"

# ---------------------------------------------------------------- check
# Two processes; `make check TESTS="-k web"` runs a part.
TESTS :=
pytest = PYTHONDONTWRITEBYTECODE=1 '$(PYTHON)' -m pytest tests -v -n 2 --dist loadgroup
python_is_here = [ -n '$(PYTHON)' ] || { echo "$@: no Python here can import $(PYTHON_NEEDS); make deps installs them"; exit 1; }

.PHONY: check check-gpu
check: | $(FIRST)
	@$(python_is_here)
	@command -v '$(or $(NVCC),nvcc)' >/dev/null || echo 'check: no nvcc: what it would compile is skipped'
	@$(gpu_is_here) || echo 'check: no NVIDIA GPU: the tests that need one are skipped'
	@$(MAKE) -s build/liboracle.so
	@$(pytest) $(TESTS)

# Alone and in one process, so that tests have the GPU to themselves, but for some that are processes
# of their own and measure nothing. A run that is cut off leaves data/check-gpu.txt.new.
check-gpu: | $(FIRST)
	@$(gpu_is_here) || { echo 'check-gpu: no NVIDIA GPU here'; exit 2; }
	@[ -n '$(NVCC)' ] || { echo 'check-gpu: there is a GPU but no nvcc'; exit 2; }
	@python=$$($(python_with_a_gpu)); \
	    "$$python" -c 'import pytest' >/dev/null 2>&1 || { \
	        echo "check-gpu: no Python here has pytest and a PyTorch that can use the GPU"; exit 2; }; \
	    { PYTHONDONTWRITEBYTECODE=1 "$$python" tests/test_submission.py compiled & } && \
	    $(MAKE) -s -j"$$(nproc)" build/liboracle.so build/gpu/oracle/oracle.o \
	        $(STAGES_HERE:%=build/gpu/stage%/driver) $(STAGES_HERE:%=build/gpu/stage%/liblayer.so); \
	    wait; \
	    PYTHONDONTWRITEBYTECODE=1 $(if $(TESTS),,CHECK_GPU=data/check-gpu.txt) \
	        "$$python" -m pytest tests -v -m gpu --durations=10 $(TESTS)

# NVIDIA's own checker, on a step of stage 7's driver at a small shape -> data/sanitize.txt
.PHONY: sanitize
sanitize: | $(FIRST)
	@$(gpu_is_here) || { echo 'sanitize: no NVIDIA GPU here'; exit 2; }
	@[ -n '$(NVCC)' ] || { echo 'sanitize: there is a GPU but no nvcc'; exit 2; }
	@$(MAKE) -s build/gpu/stage7/driver
	@python3 tests/sanitize.py --out data/sanitize.txt

# SECONDS for each of the programs, then DRAWS shapes: about an hour on two cores.
.PHONY: fuzz
SECONDS := 600
DRAWS := 500
fuzz: | $(FIRST)
	@command -v clang >/dev/null || { echo 'fuzz: no clang here; on Debian: apt-get install clang'; exit 2; }
	@$(MAKE) -s $(foreach b,plain asan,build/cpu/$b/stage7/driver)
	@python3 tests/fuzz.py --seconds=$(SECONDS) --draws=$(DRAWS)

# Several minutes on two cores.
.PHONY: mutants
mutants: | $(FIRST)
	@$(python_is_here)
	@PYTHON='$(PYTHON)' '$(PYTHON)' tests/mutants.py --out build/mutants.txt

.DEFAULT:
	@echo "make: nothing makes '$@' (stages are $(firstword $(WEB_STAGES)) to $(lastword $(WEB_STAGES))); make help lists the commands"; exit 2

# ---------------------------------------------------------------- dist
# Named after the commit where there is one, else after the day.
VERSION = $(eval VERSION := $$(shell git describe --always --dirty 2>/dev/null || date +%Y%m%d))$(VERSION)
CONTENTS = $(wildcard layer.nw stages Makefile README.md CONTRIBUTING.md CHANGELOG.md LICENSE reference.py measure.py paper data plots tests)
.PHONY: dist
dist: | $(FIRST)
	@mkdir -p build; rm -f build/layer-*.tar.gz
	@tar --exclude=__pycache__ --sort=name --owner=0 --group=0 --numeric-owner \
	    --transform 's|^|layer-$(VERSION)/|' -czf build/layer-$(VERSION).tar.gz $(CONTENTS)
	@echo "dist: build/layer-$(VERSION).tar.gz"

# ---------------------------------------------------------------- clean
.PHONY: clean
clean:
	rm -rf build
