//! Versions: the Kubernetes version that is reported, and Berth's own. Pure.

/// Kubernetes version whose behavior Berth implements.
pub const VERSION: &str = "v1.36.2";
/// Major version of Kubernetes.
pub const MAJOR: &str = "1";
/// Minor version of Kubernetes.
pub const MINOR: &str = "36";
/// The only minor version whose hidden metrics may be shown.
pub const PREVIOUS: &str = "1.35";
/// Version of Berth.
pub const BERTH: &str = env!("CARGO_PKG_VERSION");
/// Compiler of this binary, reported in place of Go's.
pub const COMPILER: &str = "rustc";

/// Operating system and architecture in Go's notation: `os/arch`.
pub fn platform() -> String {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    };
    format!("{}/{arch}", std::env::consts::OS)
}

/// Output of `--version=raw`.
pub fn raw(reported: &str) -> String {
    format!(
        "version.Info{{Major:\"{MAJOR}\", Minor:\"{MINOR}\", GitVersion:\"{reported}\", GitCommit:\"\", \
         GitTreeState:\"clean\", BuildDate:\"\", GoVersion:\"\", Compiler:\"{COMPILER}\", Platform:\"{}\"}}",
        platform()
    )
}
