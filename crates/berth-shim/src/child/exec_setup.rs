//! Final setup before `execve`, for a container's first process and for execs.
//!
//! The seccomp filter is loaded last, so that it cannot block the setup: only `execve` follows. Whatever can be checked
//! about the program is checked before, as the user who executes it (spec 09a §7.5).

use std::{
    ffi::{CString, OsStr},
    fs,
    io::{self, Write},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use nix::libc;
use rustix::{
    fs::{Access, AtFlags, CWD, Mode, OFlags, accessat},
    thread::set_no_new_privs,
};

use super::{
    Stdio,
    error_context::{ErrorContext, Step, failure, reason},
    hooks, identity,
    progress_report::Reporter,
    terminal,
};
use crate::plan::{FailureKind, HookPoint, Hooks, ProcessPlan, ShimFailure};
use berth_sys::child_process::{self, SingleThreaded};

/// Input of the final setup.
pub(super) struct ExecSetup<'a> {
    /// Process to execute.
    pub(super) process: &'a ProcessPlan,
    /// Receives the reports.
    pub(super) reporter: &'a Reporter,
    /// This process's AppArmor attribute in the host's `/proc`, if a profile is set.
    pub(super) profile: Option<OwnedFd>,
    /// Hooks of a container's first process.
    pub(super) hooks: Option<&'a Hooks>,
    /// Socket to the runner of hooks on the host.
    pub(super) line: Option<&'a hooks::RunnerSocket>,
}

/// Opens this process's AppArmor attribute, before any file of the container can take its place.
pub(super) fn open_profile(process: &ProcessPlan, host_proc: BorrowedFd<'_>) -> Step<Option<OwnedFd>> {
    if process.apparmor.is_none() {
        return Ok(None);
    }
    let open = |path| rustix::fs::openat(host_proc, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    let file = open("self/attr/apparmor/exec").or_else(|_| open("self/attr/exec"));
    file.map(Some).context(|| "open AppArmor attribute")
}

/// Installs standard input, output, and error; a pty becomes the controlling terminal of the session.
pub(super) fn take_stdio(stdio: Stdio, slave: Option<OwnedFd>) -> Step<()> {
    let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 3);
    let files = match (stdio, slave) {
        (Stdio::Files(files), _) => files,
        (Stdio::Terminal, Some(slave)) => {
            terminal::make_controlling(&slave)?;
            let (second, third) = (
                copy(&slave).context(|| "duplicate terminal descriptor")?,
                copy(&slave).context(|| "duplicate terminal descriptor")?,
            );
            [slave, second, third]
        }
        (Stdio::Terminal, None) => return Err(failure("terminal is missing")),
    };
    let [input, output, error] = files;
    // Descriptors below three could be overwritten before they are copied.
    let (input, output, error) = (copy(&input), copy(&output), copy(&error));
    rustix::stdio::dup2_stdin(input.context(|| "duplicate stdin")?).context(|| "set stdin")?;
    rustix::stdio::dup2_stdout(output.context(|| "duplicate stdout")?).context(|| "set stdout")?;
    rustix::stdio::dup2_stderr(error.context(|| "duplicate stderr")?).context(|| "set stderr")
}

/// Executes the program. Returns an exit code only on failure, after reporting it.
///
/// Closes all descriptors first, not only at `execve`: a working directory or program of `/proc/self/fd/7/../..` would
/// lead to the host (CVE-2024-21626).
pub(super) fn execute(alone: SingleThreaded, last: ExecSetup<'_>) -> i32 {
    let profile = last.profile.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    let keep = [last.reporter.number(), profile, last.line.map_or(-1, hooks::RunnerSocket::number)];
    let closed = child_process::close_all_but(alone, &keep).context(|| "close descriptors");
    let failure = match closed.and_then(|()| prepare(alone, &last)) {
        Ok(program) => {
            let error = run(last.process, &program);
            let name = last.process.args.first().map_or("", String::as_str);
            program_failure(name, &program, &error)
        }
        Err(failure) => failure,
    };
    let code = report_failure(last.reporter, &failure);
    last.line.iter().for_each(|line| line.failed());
    code
}

/// Reports a failure; returns the exit code of a program that could not be executed.
pub(super) fn report_failure(reporter: &Reporter, failure: &ShimFailure) -> i32 {
    reporter.failed(failure);
    127
}

fn prepare(alone: SingleThreaded, last: &ExecSetup<'_>) -> Step<PathBuf> {
    let process = last.process;
    let early = rustix::process::chdir(process.cwd.as_str());
    if let (Some(profile), Some(name)) = (&last.profile, &process.apparmor) {
        let mut file = fs::File::from(rustix::io::fcntl_dupfd_cloexec(profile, 3).context(|| "duplicate descriptor")?);
        file.write_all(format!("exec {name}").as_bytes()).context(|| format!("set AppArmor profile {name}"))?;
    }
    identity::set_limits(process);
    let needs_admin = process.seccomp.is_some() && !process.no_new_privileges;
    identity::become_user(process, needs_admin)?;
    if early.is_err() {
        // A file system that denies root access may admit the process's user.
        rustix::process::chdir(process.cwd.as_str()).context(|| format!("change to directory {:?}", process.cwd))?;
    }
    check_directory()?;
    let program = find(process)?;
    if process.no_new_privileges {
        set_no_new_privs(true).context(|| "set no_new_privs")?;
    }
    if let Some(hooks) = last.hooks {
        hooks::execute(alone, hooks, HookPoint::StartContainer, Some(std::process::id()))?;
    }
    rustix::process::umask(Mode::from_raw_mode(0o022));
    child_process::close_on_exec().context(|| "close descriptors")?;
    child_process::reset_signals().context(|| "reset signals")?;
    last.line.iter().for_each(|line| line.executes());
    last.reporter.executes()?;
    if let Some(filter) = &process.seccomp {
        child_process::load_filter(filter, process.seccomp_flags).context(|| "install seccomp filter")?;
    }
    Ok(program)
}

/// Rejects a working directory outside the root (CVE-2024-21626), which shows as `(unreachable)/…` or not at all.
fn check_directory() -> Step<()> {
    let path = rustix::process::getcwd(Vec::new()).context(|| "the working directory is outside of the container")?;
    if path.as_bytes().starts_with(b"/") {
        Ok(())
    } else {
        Err(failure("the working directory is outside of the container"))
    }
}

/// Path of the program: the first argument, resolved by PATH unless it contains a slash.
fn find(process: &ProcessPlan) -> Step<PathBuf> {
    let name = process.args.first().map_or("", String::as_str);
    if name.contains('/') {
        return match check(Path::new(name)) {
            Ok(()) => Ok(PathBuf::from(name)),
            Err(error) => Err(program_failure(name, Path::new(name), &error)),
        };
    }
    let path = process.env.iter().rev().find_map(|pair| pair.strip_prefix("PATH=")).unwrap_or_default();
    let mut refused = None;
    for folder in path.split(':').filter(|_| !name.is_empty()) {
        let folder = if folder.is_empty() { Path::new(".") } else { Path::new(folder) };
        let candidate = folder.join(name);
        match check(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => refused = Some((candidate, error)),
            Err(_) => {}
        }
    }
    match refused {
        Some((candidate, error)) => Err(program_failure(name, &candidate, &error)),
        None => Err(program_failure(name, Path::new(name), &io::ErrorKind::NotFound.into())),
    }
}

/// Checks whether this process may execute a file.
fn check(path: &Path) -> io::Result<()> {
    if fs::metadata(path)?.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    Ok(accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS)?)
}

/// Uses the error texts of other runtimes; people and programs search for them.
fn program_failure(name: &str, path: &Path, error: &io::Error) -> ShimFailure {
    let text = match error.kind() {
        io::ErrorKind::NotFound if name.contains('/') => {
            format!("exec: {name:?}: stat {}: no such file or directory", path.display())
        }
        io::ErrorKind::NotFound => format!("exec: {name:?}: executable file not found in $PATH"),
        // The error of `execve` itself and of runc for a directory.
        io::ErrorKind::IsADirectory => format!("exec: {name:?}: permission denied"),
        _ => format!("exec: {name:?}: {}", reason(error)),
    };
    ShimFailure { kind: FailureKind::Program, text }
}

fn run(process: &ProcessPlan, program: &Path) -> io::Error {
    let zero_ended = |text: &[u8]| CString::new(text).map_err(io::Error::from);
    let all = |texts: &[String]| texts.iter().map(|text| zero_ended(text.as_bytes())).collect::<io::Result<Vec<_>>>();
    let ready = || -> io::Result<_> {
        let program: &OsStr = program.as_os_str();
        Ok((zero_ended(program.as_bytes())?, all(&process.args)?, all(&process.env)?))
    };
    match ready() {
        Ok((program, args, env)) => match nix::unistd::execve(&program, &args, &env) {
            Err(error) => error.into(),
            Ok(never) => match never {},
        },
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_resolved_through_path_as_by_a_shell() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/folder")).expect("makeable");
        fs::create_dir_all(at("b")).expect("makeable");
        fs::write(at("a/plain"), "").expect("writable");
        fs::write(at("b/tool"), "").expect("writable");
        fs::set_permissions(at("b/tool"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("settable");
        let process = |name: &str| ProcessPlan {
            args: vec![name.to_owned()],
            env: vec!["PATH=/wrong".to_owned(), format!("PATH={0}/a:{0}/b", dir.path().display())],
            ..ProcessPlan::default()
        };
        let found = |name: &str| find(&process(name)).map_err(|failure| failure.text);
        assert_eq!(found("tool"), Ok(at("b/tool")));
        let missing = |name: &str| Err(format!("exec: {name:?}: executable file not found in $PATH"));
        for name in ["nothing", "folder", ""] {
            assert_eq!(found(name), missing(name));
        }
        assert_eq!(found("plain"), Err("exec: \"plain\": permission denied".to_owned()));
        let path = at("nothing").display().to_string();
        assert_eq!(found(&path), Err(format!("exec: {path:?}: stat {path}: no such file or directory")));
        let folder = at("a").display().to_string();
        assert_eq!(found(&folder), Err(format!("exec: {folder:?}: permission denied")));
        let format = program_failure("x", Path::new("/x"), &io::Error::from_raw_os_error(libc::ENOEXEC));
        assert_eq!((format.kind, format.text.as_str()), (FailureKind::Program, "exec: \"x\": exec format error"));
    }
}
