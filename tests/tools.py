"""What the tests share: where things are, running make, the chunks of layer.nw."""
import concurrent.futures
import contextlib
import fcntl
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
STAGES = sorted(p.parent.name for p in ROOT.glob("stages/stage*/driver.c"))
PARTS = ["Makefile", "layer.nw", "stages", "paper", "plots", "tests", "README.md",
         "CONTRIBUTING.md", "CHANGELOG.md", "data", "LICENSE", "reference.py", "measure.py"]


def clean_environment(**more):
    """The environment without what an outer make leaves in it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTEST_"))}
    for name in ("D FFN NQ NKV HD PREFILL SEED DEBUG LINE CPU_SEED CPU_SMS CHECK_GPU LAYERS_ON TIMERS TWIN "
                 "LAYER_DEPENDENT").split():
        env.pop(name, None)
    return {**env, **more}


def run(command, cwd=ROOT, timeout=300, **env):
    """Runs a command; returns its exit status and its output and messages together."""
    done = subprocess.run(command, cwd=cwd, env=clean_environment(**env), timeout=timeout,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.returncode, done.stdout


def watched(command, limit, **env):
    """Runs a command that may hang: its verdict, which is "passed", "failed" or "hung", and its output."""
    process = subprocess.Popen(command, cwd=ROOT, env=clean_environment(**env), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit)
        return "passed" if process.returncode == 0 else "failed", f"{output}exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "hung", f"{process.communicate()[0]}stopped after {limit} s"


@contextlib.contextmanager
def started(work, names, at_once=4):
    """Starts work(name) for each of the names, so many at once, for tests that are processes of their own
    and do not measure; yields a function that waits for the result of one. Once it has given all of
    them, nothing runs any more."""
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        futures = {name: pool.submit(work, name) for name in names}
        try:
            yield lambda name: futures[name].result()
        finally:
            for future in futures.values():
                future.cancel()


def chosen(request, test, parameter):
    """The values of a parameter with which a test of this module is going to run."""
    return [item.callspec.params[parameter] for item in request.session.items
            if item.originalname == test and item.path == request.path]


def in_one_process(script, names, limit):
    """Runs `script NAME ...`, which prints "NAME passed" for each, in as few processes as it takes: a new
    one after each that fails. The verdict and the output for each name."""
    results, left = {}, list(names)
    while left:
        verdict, output = watched([sys.executable, str(script), *left], limit)
        said = []
        for line in output.splitlines():
            said.append(line)
            if line.endswith(" passed") and line[:-len(" passed")] in left:
                results[line[:-len(" passed")]] = ("passed", "\n".join(said))
                left.remove(line[:-len(" passed")])
                said = []
        if left:
            results[left.pop(0)] = (verdict if verdict != "passed" else "failed", output)
    return results


def make(*targets, cwd=ROOT, **kw):
    return run(["make", *targets], cwd=cwd, **kw)


def must_make(*targets, **kw):
    status, output = make(*targets, **kw)
    assert status == 0, f"make {' '.join(targets)} failed:\n{output}"
    return output


@contextlib.contextmanager
def alone():
    """Of several tests at once, one may build in the working tree."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(target):
    """Builds a file in the working tree, unless it is up to date, and returns its path."""
    with alone():
        must_make("-s", "-j2", target)
    return ROOT / target


def stage_and_cpu(stage, folder, record, *options, kernels=None):
    """A stage, its submission's record.c and the CPU target in one shared library in folder: its
    path. kernels: the text of the kernel file, where it is not the stage's own."""
    own = ROOT / "stages" / stage
    sources = {ROOT / "stages/cpu/cpu.c": ["-std=gnu11"], own / "layer.c": ["-std=c11"]}
    for name, text, how in (("record.c", record, []), ("kernels.cu", kernels, ["-x", "c"])):
        source = own / name
        if text is not None:
            source = folder / name
            source.write_text(text, encoding="utf-8")
        sources[source] = [*how, "-std=c11"]
    objects = []
    for source, how in sources.items():
        objects.append(str(folder / (source.name + ".o")))
        subprocess.run(["gcc", *how, *options, "-O2", "-fPIC", "-I", str(ROOT / "stages/cpu"), "-I", str(own),
                        "-c", str(source), "-o", objects[-1]], check=True)
    path = folder / "layer.so"
    subprocess.run(["gcc", "-shared", "-Wl,-Bsymbolic", "-o", str(path), *objects, "-lm"], check=True)
    return path


def copy_to(folder):
    folder.mkdir(parents=True)
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, folder / name)
    return folder


def roots():
    """The files that the Makefile says layer.nw tangles into."""
    return must_make("-s", "roots").split()


def files(folder):
    """Each file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(folder.rglob("*")) if p.is_file()}


@functools.lru_cache(None)
def gpu_is_here():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return False
    return b"GPU" in listed.stdout and nvcc() is not None


def nvcc():
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def chunks(web):
    """The chunks of a web: (line number, name, lines of code), one for each definition."""
    found, body = [], None
    for number, line in enumerate(web.splitlines(), 1):
        start = re.match(r"<<(.*)>>=\s*$", line)
        if start:
            body = []
            found.append((number, start.group(1), body))
        elif re.match(r"@(\s|$)", line):
            body = None
        elif body is not None:
            body.append(line.replace("@<<", "<<").replace("@>>", ">>"))
    for _, _, body in found:
        while body and not body[-1].strip():
            body.pop()
    return found
