//! Standard streams of a container's first process: pipes or pty, and the shim's ends of them.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{Gid, Mode, OFlags, Uid},
    pipe::{PipeFlags, pipe_with},
};

use super::{
    super::plan::{IdMap, LaunchPlan},
    input::Input,
    launcher::Stdio,
    output::OutputStream,
};

/// The shim's ends of the streams.
#[derive(Debug)]
pub struct StreamEnds {
    /// The container's stdin.
    pub input: Input,
    /// The container's output: stdout and stderr, or its terminal.
    pub outputs: [Option<OutputStream>; 2],
}

/// Creates pipes, unless the container has a terminal. They belong to the container's user, so that it can open
/// `/dev/stdout`.
///
/// # Errors
/// If no descriptor is available.
pub fn make(plan: &LaunchPlan, users: Option<(IdMap, IdMap)>) -> io::Result<(Stdio, Option<StreamEnds>)> {
    if plan.process.terminal.is_some() {
        return Ok((Stdio::Terminal, None));
    }
    let (stdin, input) = if plan.stdin {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        (theirs, Some(ours))
    } else {
        (rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?, None)
    };
    let (out, stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (err, stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    let owner = |id: u32, map: Option<IdMap>| map.map_or(Some(id), |map| outside(id, map));
    let uid = owner(plan.process.uid, users.map(|(users, _)| users)).map(Uid::from_raw);
    let gid = owner(plan.process.gid, users.map(|(_, groups)| groups)).map(Gid::from_raw);
    for pipe in [&out, &err].into_iter().chain(&input) {
        rustix::io::ioctl_fionbio(pipe, true)?;
        // Not permitted without root: then there is one user only.
        let _ = rustix::fs::fchown(pipe, uid, gid);
    }
    let outputs =
        [Some(OutputStream::new(out, plan.longest_record)), Some(OutputStream::new(err, plan.longest_record))];
    Ok((Stdio::Files([stdin, stdout, stderr]), Some(StreamEnds { input: Input::new(input, plan.stdin_once), outputs })))
}

/// The shim's ends of a terminal.
///
/// # Errors
/// If no descriptor is available.
pub fn of_terminal(master: &OwnedFd, has_stdin: bool, longest_record: usize) -> io::Result<StreamEnds> {
    rustix::io::ioctl_fionbio(master, true)?;
    let input = has_stdin.then(|| master.as_fd().try_clone_to_owned()).transpose()?;
    let output = master.as_fd().try_clone_to_owned()?;
    // The end of a client's input never closes a terminal.
    Ok(StreamEnds { input: Input::new(input, false), outputs: [Some(OutputStream::new(output, longest_record)), None] })
}

/// Maps an id of the container to the host; `None` if it is not mapped.
fn outside(id: u32, map: IdMap) -> Option<u32> {
    let offset = id.checked_sub(map.inside).filter(|offset| *offset < map.count)?;
    map.outside.checked_add(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_mapped_to_those_of_the_host() {
        let map = IdMap { inside: 10, outside: 1000, count: 5 };
        for (id, expected) in [(10, Some(1000)), (14, Some(1004)), (15, None), (9, None)] {
            assert_eq!(outside(id, map), expected, "{id}");
        }
        assert_eq!(outside(4, IdMap { inside: 0, outside: u32::MAX, count: 9 }), None);
    }
}
