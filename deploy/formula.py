"""Prints a Homebrew formula for a source archive of Outrider.

    python deploy/formula.py ARCHIVE URL > outrider.rb

ARCHIVE is what `python -m hatchling build -t sdist` wrote; URL is where it can be downloaded. The formula
installs the versions of requirements.lock, which is in the archive. Version and checksum are the archive's.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = re.compile(r"outrider-(\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?)\.tar\.gz")

FORMULA = """class Outrider < Formula
  desc "LLM server on MLX in which every request drafts at its own pace"
  url "{url}"
  version "{version}"
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on "python@3.13"

  def install
    # Versions without hashes, as constraints: pip takes the wheels that suit this machine.
    lines = File.readlines("requirements.lock", chomp: true).grep(/\\A[a-z0-9.-]+==/)
    (buildpath/"versions.txt").write lines.map {{ |line| line.delete_suffix(" \\\\") }}.join("\\n") + "\\n"
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--disable-pip-version-check",
           "--constraint", "versions.txt", buildpath
    bin.install_symlink libexec/"bin/outrider"
  end

  service do
    run [opt_bin/"outrider", "serve"]
    keep_alive successful_exit: false
    log_path var/"log/outrider.log"
    error_log_path var/"log/outrider.log"
  end

  test do
    assert_match "outrider serve", shell_output(bin/"outrider")
    assert_match version.to_s, shell_output("#{{bin}}/outrider --version")
  end
end
"""


def formula(archive: Path, url: str) -> str:
    found = NAME.fullmatch(archive.name)
    if found is None:
        sys.exit(f"{archive.name} is no source archive of Outrider (outrider-VERSION.tar.gz)")
    if not re.fullmatch(r"(?:https|file)://[^\s\"#]+", url):
        sys.exit(f"{url!r} is no https: or file: address")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return FORMULA.format(url=url, version=found.group(1), sha256=digest)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(formula(Path(sys.argv[1]), sys.argv[2]), end="")
