# kimi-trt: checkpoint → ONNX graphs → TensorRT engines → tokens. `make help` lists the targets.
#
# Everything that changes an artifact's content is in its path: build/<model>/<precision>/, and below it
# <compiler>-<sm>-<profile>/. Which checkpoint a build is made of is recorded in its checkpoint.json: the record is
# refreshed at every run and keeps its time where the checkpoint is the same, wherever it lies; another one makes
# everything that follows from it anew. The exporter runs on every edit of its sources, but an ONNX file is replaced
# only where its bytes changed, so an engine is rebuilt only then. Packed weights depend on the checkpoint and on
# spec.json alone. A deleted output comes back. One make at a time writes to build/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

MODEL ?= models/k2-nano
PRESET ?=
PRECISION ?= fp8
TARGET ?= auto
COMPILER ?= rtx
BATCH ?= 8
TOKENS ?= 128
CONTEXT ?= 4096
PROMPT ?= And it came to pass
MAX_NEW_TOKENS ?= 256
TEMPERATURE ?= 0
SEED ?= 0
TEXT ?= $(MODEL)/heldout.txt
GOLDEN_OPTIONS ?=

PYTHON := .venv/bin/python
PRECISIONS := fp32 bf16 fp8
PRESETS := k2 k2-0905 k2-thinking k2.5 deepseek-v3 deepseek-v3.1 moonlight deepseek-v2-lite
COMPILERS := rtx tensorrt
TARGETS_rtx := sm75 sm80 sm86 sm89 sm120 sm121
TARGETS_tensorrt := sm75 sm80 sm86 sm89 sm90 sm100 sm103 sm120 sm121
NAME := $(if $(PRESET),$(PRESET),$(lastword $(notdir $(abspath $(MODEL)))))
BUILD := build/$(NAME)/$(PRECISION)

.PHONY: help setup graphs weights golden parity engines presets generate evaluate quality train full-size bench bench-moe \
	gpu-bench gpu-check lint test test-slow check clean
.DEFAULT_GOAL := help
GOALS := $(or $(MAKECMDGOALS),help)
DRY := $(strip $(foreach flag,n q t,$(findstring $(flag),$(filter-out ---%,$(firstword -$(MAKEFLAGS))))))

# A misspelt variable ends make before anything runs, in one line.
choice = $(if $(and $(filter 1,$(words $($1))),$(filter $2,$($1))),,$(error $1=$($1): expected one of: $2))
PLAIN_GOALS := help setup lint test test-slow check clean
ifneq ($(filter-out $(PLAIN_GOALS),$(GOALS)),)
$(call choice,PRECISION,$(PRECISIONS))
$(call choice,COMPILER,$(COMPILERS))
$(call choice,TARGET,auto $(TARGETS_$(COMPILER)))
ifneq ($(PRESET),)
$(call choice,PRESET,$(PRESETS))
$(foreach goal,$(filter weights golden parity generate evaluate quality gpu-bench gpu-check,$(GOALS)),\
	$(error PRESET=$(PRESET): a preset has no weights; for make $(goal) give MODEL=, the folder of a checkpoint))
else ifneq ($(filter-out 0 1,$(words $(MODEL))),)
$(error MODEL="$(MODEL)": expected one path without spaces, at which make splits; give it a link without: \
	ln -s "$(MODEL)" $(lastword x $(subst /, ,$(MODEL))))
else ifneq ($(filter-out $(PLAIN_GOALS) presets train full-size bench-moe,$(GOALS)),)
$(if $(wildcard $(MODEL)/config.json),,$(error MODEL=$(MODEL): expected a folder with a config.json, such as: \
	$(patsubst %/config.json,%,$(wildcard models/*/config.json))))
endif
endif

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 12

setup: .venv/.installed ## make .venv with the pinned packages

FORCE:

ifeq ($(KIMI_TRT_LOCK)$(DRY),)
# What writes to build/ runs in a make of its own that holds a lock of the kernel's. All that it starts inherits the
# open file, so the lock ends with the last process that could still write, however that one ends.
define LOCKED_MAKE
@command -v flock >/dev/null || { echo "flock: not found; install util-linux" >&2; exit 1; }
@mkdir -p build
+@exec 9>>build/.lock; \
	flock --nonblock 9 || { echo "waiting for $$(cat build/.lock), which writes to build/" >&2; flock 9; }; \
	echo "process $$$$ (make $(GOALS))" >build/.lock; \
	KIMI_TRT_LOCK=held exec $(MAKE) --no-print-directory $@
endef

graphs weights golden parity engines presets quality train full-size bench bench-moe gpu-bench gpu-check clean:
	$(LOCKED_MAKE)

build/%: FORCE
	$(LOCKED_MAKE)

else

SOURCE := $(if $(PRESET),--preset $(PRESET),--checkpoint $(MODEL))
CONFIG := $(if $(PRESET),graphs/contract/presets/$(PRESET).json,$(MODEL)/config.json)
GRAPHS := dense moe experts head
FINDINGS := parity/graphs.json parity/chain.json

# `auto` is this machine's GPU, else sm120: asked of the driver, since the answer is part of a path.
GPU = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
SM := $(if $(filter auto,$(TARGET)),sm$(or $(GPU),120),$(TARGET))
ENGINES := $(BUILD)/$(COMPILER)-$(SM)-b$(BATCH)t$(TOKENS)c$(CONTEXT)

# The sources that each kind of artifact is made by: what its command imports, folder by folder.
python_files = $(shell find $1 -name '*.py')
CONTRACT_SOURCES := $(call python_files,graphs/contract graphs/ops)
GRAPH_SOURCES := $(CONTRACT_SOURCES) $(call python_files,export/engine graphs/passes) graphs/parity/taps.py export/__main__.py
GOLDEN_SOURCES := $(CONTRACT_SOURCES) $(call python_files,export/checkpoint export/engine export/golden export/packing \
	export/reference) export/__main__.py
PARITY_SOURCES := $(CONTRACT_SOURCES) $(call python_files,graphs/passes graphs/parity) graphs/session.py
CHAIN_SOURCES := $(PARITY_SOURCES) $(call python_files,runtime/backends runtime/cache runtime/devices runtime/serving \
	runtime/step runtime/tokenizers) runtime/parity.py
REPORT_SOURCES := $(wildcard graphs/report/*.*)
SYNTHETIC_SOURCES := export/synthetic/make.py export/synthetic/random_weights.py export/synthetic/write_shards.py

# The recipe of a file made by its stamp's rule: bring it back where it was deleted. A stamp that lists its files
# brings back only those that it still lists.
RESTORE = test -e $@ || { rm -f $<; $(MAKE) --no-print-directory $<; }
RESTORE_LISTED = ! grep -qxF $@ $< || $(RESTORE)

# One set of rules per precision; $1 is the precision.
# A stamp that lists files also brings back any of them that was deleted.
define PRECISION_RULES
WEIGHTS_$1 := $$(shell cat build/$(NAME)/$1/.weights 2>/dev/null)
GOLDENS_$1 := $$(shell cat build/$(NAME)/$1/.golden 2>/dev/null)

# Both are refreshed at every run, but keep their time where they say the same. A dry run takes them as they are.
build/$(NAME)/$1/.config: FORCE
	+@$(if $(DRY),:,mkdir -p $$(@D); cmp -s $(CONFIG) $$@ || cp $(CONFIG) $$@)

build/$(NAME)/$1/checkpoint.json: FORCE | build/$(NAME)/$1/spec.json .venv/.installed
	+@$(if $(DRY),:,$(PYTHON) -m export record --checkpoint $(MODEL) --out $$(@D))

build/$(NAME)/$1/.exported: build/$(NAME)/$1/.config $(GRAPH_SOURCES) | .venv/.installed
	@rm -rf $$(@D)/.fresh
	$(PYTHON) -m export graphs $(SOURCE) --precision $1 --out $$(@D)/.fresh
	@mkdir -p $$(@D)/onnx
	@for f in $(GRAPHS:%=onnx/%.onnx) spec.json; do \
		cmp -s $$(@D)/.fresh/$$$$f $$(@D)/$$$$f || mv $$(@D)/.fresh/$$$$f $$(@D)/$$$$f; done
	@rm -rf $$(@D)/.fresh
	@touch $$@

$(GRAPHS:%=build/$(NAME)/$1/onnx/%.onnx) build/$(NAME)/$1/spec.json: build/$(NAME)/$1/.exported
	@$$(RESTORE)

build/$(NAME)/$1/.weights: build/$(NAME)/$1/checkpoint.json build/$(NAME)/$1/spec.json
	$(PYTHON) -m export weights --checkpoint $(MODEL) --out $$(@D) > $$@.tmp
	@mv $$@.tmp $$@

build/$(NAME)/$1/.golden: build/$(NAME)/$1/checkpoint.json build/$(NAME)/$1/spec.json $(GOLDEN_SOURCES) \
		| build/$(NAME)/$1/.weights
	$(PYTHON) -m export golden --checkpoint $(MODEL) --out $$(@D) $(GOLDEN_OPTIONS) > $$@.tmp
	@mv $$@.tmp $$@

# Past tolerance these fail and yet leave what they found; the report, made of it, is what says so.
build/$(NAME)/$1/parity/graphs.json: PACKAGE := graphs
build/$(NAME)/$1/parity/graphs.json: $(PARITY_SOURCES)
build/$(NAME)/$1/parity/chain.json: PACKAGE := runtime
build/$(NAME)/$1/parity/chain.json: $(CHAIN_SOURCES)
$(FINDINGS:%=build/$(NAME)/$1/%): build/$(NAME)/$1/.weights $$(WEIGHTS_$1) build/$(NAME)/$1/.golden $$(GOLDENS_$1) \
		$(GRAPHS:%=build/$(NAME)/$1/onnx/%.onnx)
	@rm -f $$@
	@$(PYTHON) -m $$(PACKAGE) parity build/$(NAME)/$1 || test -e $$@

build/$(NAME)/$1/.parity: $(FINDINGS:%=build/$(NAME)/$1/%) $(REPORT_SOURCES)
	@$(PYTHON) -m graphs report $$(@D) --out $$(@D)
	@touch $$@

$$(WEIGHTS_$1): build/$(NAME)/$1/.weights
	@$$(RESTORE_LISTED)

$$(GOLDENS_$1): build/$(NAME)/$1/.golden
	@$$(RESTORE_LISTED)
endef
$(foreach precision,$(PRECISIONS),$(eval $(call PRECISION_RULES,$(precision))))

# Two layers of K2 at full width with random weights, one of each type, for fp8; the dense one alone for fp32.
# The rules above make all that follows from such a checkpoint, in a make of their own that is told where it is.
FULL := build/full-size
FULL_CHECKPOINTS := $(FULL)/k2/checkpoint/config.json $(FULL)/k2-dense/checkpoint/config.json
FULL_MAKE = $(MAKE) --no-print-directory MODEL=$(FULL)/$1/checkpoint NAME=full-size/$1 PRECISIONS=$2 PRECISION=$2 \
	GOLDEN_OPTIONS=--blocks-only

$(FULL)/k2/checkpoint/config.json: LAYERS := 2
$(FULL)/k2-dense/checkpoint/config.json: LAYERS := 1
$(FULL_CHECKPOINTS): graphs/contract/presets/k2.json $(SYNTHETIC_SOURCES) | .venv/.installed
	@rm -rf $(dir $(@D)) # with what was packed from an older one, or the disk would have to hold both
	$(PYTHON) -m export synthetic --preset k2 --layers $(LAYERS) --vocab 1024 --out $(@D)

# The same model with its routed experts in INT4, and its fp8 build, made by the rules above likewise.
INT4 := build/$(NAME)/int4

$(INT4)/checkpoint/config.json: build/$(NAME)/fp8/checkpoint.json bench/quality/int4_checkpoint.py \
		graphs/contract/presets/k2-thinking.json export/synthetic/write_checkpoint.py export/checkpoint/group_int4.py \
		| .venv/.installed
	$(PYTHON) -m bench.quality.int4_checkpoint $(MODEL) $(@D)

# Every preset's engines, for every generation of RTX cards that has FP8.
PRESET_TARGETS := sm120 sm89
PRESET_MANIFESTS := $(foreach preset,$(PRESETS),$(foreach target,$(PRESET_TARGETS),\
	build/$(preset)/$(PRECISION)/$(COMPILER)-$(target)-b$(BATCH)t$(TOKENS)c$(CONTEXT)/manifest.json))

graphs: $(GRAPHS:%=$(BUILD)/onnx/%.onnx) $(BUILD)/spec.json ## export the four ONNX graphs (MODEL= or PRESET=, PRECISION=)
weights: $(BUILD)/.weights $(WEIGHTS_$(PRECISION)) ## pack the checkpoint's weights for the engines
golden: $(BUILD)/.golden $(GOLDENS_$(PRECISION)) ## what the torch reference computes for fixed inputs
parity: $(foreach precision,$(PRECISIONS),$(FINDINGS:%=build/$(NAME)/$(precision)/%)) ## graphs, blocks and chain against the reference, all precisions, in build/NAME/report.html
	@$(PYTHON) -m graphs report $(PRECISIONS:%=build/$(NAME)/%) --out build/$(NAME)
engines: $(if $(PRESET),,$(BUILD)/.parity) $(ENGINES)/.engines $(GRAPHS:%=$(ENGINES)/%.engine) $(ENGINES)/manifest.json ## everything up to the TensorRT engines (MODEL= or PRESET=, PRECISION= TARGET= BATCH= TOKENS= CONTEXT=)
presets: .venv/.installed ## engines of every preset for sm120 and sm89, and their table (PRECISION= BATCH= TOKENS= CONTEXT=)
	@for preset in $(PRESETS); do for target in $(PRESET_TARGETS); do \
		$(MAKE) --no-print-directory engines PRESET=$$preset TARGET=$$target || exit 1; done; done
	@$(PYTHON) -m graphs table $(PRESET_MANIFESTS)

quality: $(foreach p,$(PRECISIONS),build/$(NAME)/$p/.weights $(WEIGHTS_$p)) $(INT4)/checkpoint/config.json ## what each precision and each kind of linear layer costs on the held-out text (TEXT=; 10 minutes)
	@$(MAKE) --no-print-directory MODEL=$(INT4)/checkpoint NAME=$(NAME)/int4 PRECISIONS=fp8 PRECISION=fp8 weights
	$(PYTHON) -m bench.quality.quality $(MODEL) build/$(NAME) --text "$(TEXT)"

train: .venv/.installed ## train k2-nano anew into build/trained (about 12 minutes)
	$(PYTHON) -m models.train --out build/trained

full-size: $(FULL_CHECKPOINTS) ## parity of K2 layers at full width with random weights: dense fp32 and fp8, MoE fp8 (40 GB of disk, 6 minutes)
	@$(call FULL_MAKE,k2-dense,fp32) parity
	@$(call FULL_MAKE,k2,fp8) parity

bench: $(FULL)/k2-dense/checkpoint/config.json build/$(NAME)/fp32/.weights build/$(NAME)/fp8/.weights ## speed beside transformers and what memory allows, batching, overhead, start-up, compile time, in build/bench (3 GB of disk, 15 minutes)
	@$(call FULL_MAKE,k2-dense,fp32) weights
	$(PYTHON) -m bench.speed.run measure $(FULL)/k2-dense/fp32 $(FULL)/k2-dense/checkpoint build/$(NAME)/fp32 $(MODEL) \
		--text "$(TEXT)" --out build/bench
	@for p in fp32 fp8; do $(PYTHON) -m bench.speed.batching build/$(NAME)/$$p; done
	@$(MAKE) --no-print-directory PRESET=k2 PRECISION=fp8 graphs
	$(PYTHON) -m bench.host.overhead build/k2/fp8
	$(PYTHON) -m bench.host.startup build/$(NAME)/fp32 build/$(NAME)/fp8
	$(PYTHON) -m bench.host.compile_time

bench-moe: $(FULL)/k2/checkpoint/config.json ## full width: a MoE decode step's seconds and memory, packing against cp, and killed (40 GB of disk, 10 minutes)
	@$(call FULL_MAKE,k2,fp8) weights
	$(PYTHON) -m bench.full_width.moe_step $(FULL)/k2/fp8
	$(PYTHON) -m bench.full_width.packing $(FULL)/k2/checkpoint $(FULL)/k2/fp8

gpu-bench: $(BUILD)/.weights $(WEIGHTS_$(PRECISION)) $(ENGINES)/.engines $(GRAPHS:%=$(ENGINES)/%.engine) $(ENGINES)/manifest.json ## each engine and the chain on this machine's GPU beside its roofline, in build/NAME/PRECISION/bench.json
	$(PYTHON) -m runtime bench $(BUILD) --backend tensorrt --engines $(ENGINES) --out $(BUILD)/bench.json

gpu-check: $(foreach p,$(PRECISIONS),build/$(NAME)/$p/.weights build/$(NAME)/$p/.golden $(WEIGHTS_$p) $(GOLDENS_$p)) ## the runtime's tests and parity of all precisions on this machine's GPU, in one table
	@$(PYTHON) -m bench.gpu_check $(PRECISIONS:%=build/$(NAME)/%)

clean: ## remove every build, not the virtual environment
	rm -rf build/* # the lock, which begins with a dot, stays

# Only the graphs that changed are compiled; a folder that lacks an engine is made whole.
$(ENGINES)/.engines: $(GRAPHS:%=$(BUILD)/onnx/%.onnx)
	$(PYTHON) -m graphs compile $(BUILD) --target $(SM) --compiler $(COMPILER) \
		--batch $(BATCH) --tokens $(TOKENS) --context $(CONTEXT) \
		$(patsubst $(BUILD)/onnx/%.onnx,--graph %,$(if $(wildcard $@),$?,$^))
	@touch $@

$(GRAPHS:%=$(ENGINES)/%.engine) $(ENGINES)/manifest.json: $(ENGINES)/.engines
	@$(RESTORE)
endif

generate: weights ## write text (PROMPT= MAX_NEW_TOKENS= TEMPERATURE= SEED=)
	@$(PYTHON) -m runtime generate $(BUILD) --prompt "$$PROMPT" --max-new-tokens $(MAX_NEW_TOKENS) \
		--temperature $(TEMPERATURE) --seed $(SEED)
export PROMPT

evaluate: $(PRECISIONS:%=build/$(NAME)/%/.weights) ## bits per byte of the held-out text, all precisions (TEXT=)
	@for p in $(PRECISIONS); do echo -n "$$p: "; \
		$(PYTHON) -m runtime evaluate build/$(NAME)/$$p --text "$(TEXT)" --threads 1; done

lint: .venv/.installed ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: .venv/.installed ## the tests, but for the slow ones
	$(PYTHON) -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: .venv/.installed ## the slow tests: full width, subprocesses and what takes long
	$(PYTHON) -m pytest -n 2 --dist loadfile -m slow

check: lint test ## lint and test

.venv/.installed: pyproject.toml constraints.txt
	@python=.venv/bin/python; test -x $$python || python=python3; \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "expected Python 3.11 or newer, got $$($$python --version 2>&1); remove .venv, if there is one, and make" \
			"it with a newer Python: python3.12 -m venv .venv" >&2; exit 1; }
	@test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[export,compile,dev]'
	@touch $@
