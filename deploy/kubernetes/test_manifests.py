"""The manifests: that they fit together, and that the program knows every option and route in them.

    python test_manifests.py target/release/warpsmith

Needs PyYAML.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Json = dict[str, Any]


def check(holds: Any, told: str) -> None:
    """Fails with these words if something does not hold."""
    if not holds:
        raise AssertionError(told)


def objects(name: str) -> dict[str, Json]:
    """The objects of a file, by their kinds."""
    with (HERE / name).open() as file:
        found = {each["kind"]: each for each in yaml.safe_load_all(file)}
    for kind, each in found.items():
        check(each["apiVersion"] and (kind == "Kustomization" or each["metadata"]["name"]), f"{kind} in {name}")
    return found


def routes() -> set[str]:
    """The paths that the server has, as its OpenAPI document lists them."""
    source = (ROOT / "crates/server/src/routes/openapi.rs").read_text()
    return set(re.findall(r'\(\s*"(?:get|post)",\s*"([^"]+)"', source))


def options(all_objects: dict[str, Json]) -> Json:
    """The options of the server. Its TOML has one entry a line, whose values are JSON's too."""
    lines = all_objects["ConfigMap"]["data"]["server.toml"].splitlines()
    return {name: json.loads(value) for name, _, value in (line.partition(" = ") for line in lines)}


def test_parts(all_objects: dict[str, Json], monitor: Json) -> None:
    """Names, labels, ports and volumes fit together."""
    pod = all_objects["Deployment"]["spec"]["template"]
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    (container,) = spec["containers"]
    check(all_objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels, "the Deployment selects others")
    check(all_objects["Service"]["spec"]["selector"] == labels, "the Service selects others")
    check(all_objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels, "the budget is of others")
    check(monitor["spec"]["selector"]["matchLabels"] == all_objects["Service"]["metadata"]["labels"], "the monitor")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    config = options(all_objects)
    check(ports == {"http": config["port"]}, f"the server listens on {config['port']} and the container on {ports}")
    check(config["host"] == "0.0.0.0", "the server is not reachable from outside of its Pod")
    check(all_objects["Service"]["spec"]["ports"][0]["targetPort"] in ports, "the Service leads to no port")
    check(monitor["spec"]["endpoints"][0]["port"] == all_objects["Service"]["spec"]["ports"][0]["name"], "its port")
    annotations = pod["metadata"]["annotations"]
    check(annotations["prometheus.io/port"] == str(config["port"]), "the annotation names another port")
    paths = [annotations["prometheus.io/path"], monitor["spec"]["endpoints"][0]["path"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        check(get["port"] in ports, f"{probe} asks no port")
        # It is the one that needs no key.
        check(get["path"] == "/health", f"{probe} asks for {get['path']}")
        paths.append(get["path"])
    check(set(paths) <= routes(), f"the server has not all of {paths}")
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    check(mounted.keys() == volumes.keys(), f"{mounted.keys() ^ volumes.keys()} are mounted or there, not both")
    check(config["model"].startswith(mounted["models"] + "/"), "the model is in no volume")
    check(volumes["config"]["configMap"]["name"] == all_objects["ConfigMap"]["metadata"]["name"], "its ConfigMap")
    args = container["args"]
    check(args[args.index("--config") + 1] == f"{mounted['config']}/server.toml", "the options are elsewhere")
    environment = {each["name"]: each for each in container["env"]}
    for name in re.findall(r"\$\((\w+)\)", " ".join(args)):
        check(name in environment, f"$({name}) is no variable")
    secret = environment["API_KEY"]["valueFrom"]["secretKeyRef"]
    check(monitor["spec"]["endpoints"][0]["authorization"]["credentials"] == secret, "the monitor has another key")
    check(environment["XDG_CACHE_HOME"]["value"] in mounted.values(), "the cache is in no volume")
    ends = config["shutdown-timeout"] + container["lifecycle"]["preStop"]["sleep"]["seconds"]
    check(spec["terminationGracePeriodSeconds"] > ends, "the Pod is killed before its requests have ended")
    check(objects("kustomization.yaml")["Kustomization"]["resources"] == ["warpsmith.yaml"], "its resources")
    check(
        objects("kustomization.yaml")["Kustomization"]["images"][0]["name"] == container["image"].split(":")[0], "image"
    )


def test_options(all_objects: dict[str, Json], program: str) -> None:
    """The program takes the options: it fails at the model, which is not here, and at nothing before."""
    (container,) = all_objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "server.toml"

        def run(text: str) -> str:
            file.write_text(text)
            place = {"/etc/warpsmith/server.toml": str(file), "$(API_KEY)": "a-key"}
            command = [program, *(place.get(word, word) for word in container["args"])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            check(done.returncode != 0, f"{command} succeeded")
            return done.stderr

        text = all_objects["ConfigMap"]["data"]["server.toml"]
        # Where no port is taken from others.
        text = text.replace('host = "0.0.0.0"', 'host = "127.0.0.1"').replace("port = 30000", "port = 0")
        told = run(text)
        check("/models/model" in told, f"it fails at something else than the model: {told}")
        told = run(text.replace("max-running-requests", "max-walking-requests"))
        check("max-walking-requests" in told and "/models/model" not in told, f"wrong options are not told: {told}")


def test_image() -> None:
    """The Dockerfile uses what is here, in the versions that are tested."""
    text = (HERE / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        missing = [source for source in sources if not (ROOT / source).exists()]
        check(not missing, f"{missing} are not here")
    rust = re.findall(r'^channel = "(.+)"$', (ROOT / "rust-toolchain.toml").read_text(), re.MULTILINE)
    check(len(rust) == 1 and f"FROM rust:{rust[0]}-" in text, f"the image is not built with Rust {rust}")
    pinned = re.findall(r"^nvidia-cuda-nvrtc==\S+$", (ROOT / "scripts/requirements.txt").read_text(), re.MULTILINE)
    check(len(pinned) == 1 and pinned[0] in text, f"the image has another version than {pinned}")


def main() -> int:
    all_objects = objects("warpsmith.yaml")
    monitor = objects("servicemonitor.yaml")["ServiceMonitor"]
    test_parts(all_objects, monitor)
    test_options(all_objects, sys.argv[1])
    test_image()
    print("kubernetes: 3 passed; 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
