//! Root file system of a container, assembled by the helper in its own mount namespace.
//!
//! Implements spec 09a §10 step 6.

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
};
use rustix::fs::{CWD, Gid, Mode, OFlags, Uid};

use super::{
    PodContext,
    error_context::{ErrorContext, Step, failure},
    mounts::{self, PreparedMount},
    process_setup::on_host,
};
use crate::plan::{LaunchPlan, Mount, MountKind, Namespace, RootKind};
use berth_sys::{
    child_process::SingleThreaded,
    in_root,
    mount_api::{self, Change, MountScope},
};

/// Maximum length of mount options, bytes: a page without its terminating zero.
const LONGEST: usize = 4095;

/// Mounts a tmpfs on the stage directory and enters it. Other users may traverse it, but not list it.
pub(super) fn open_stage(stage: &Path) -> Step<()> {
    let what = || format!("create staging directory {}", stage.display());
    fs::create_dir_all(stage).context(what)?;
    let tmpfs = mount_api::new_mount("tmpfs", "mode=711", libc::MS_NOSUID).context(what)?;
    let at = rustix::fs::openat(CWD, stage, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    mount_api::attach(tmpfs.as_fd(), at.context(what)?.as_fd()).context(what)?;
    rustix::process::chdir(stage).context(what)
}

/// Creates the root as a detached mount.
pub(super) fn make(plan: &LaunchPlan, around: &PodContext<'_>) -> Step<OwnedFd> {
    let stage = &plan.root.stage;
    let root = match &plan.root.kind {
        RootKind::Overlay { layers, lower, upper, work, userxattr } => {
            let over = OverlayMount { layers, lower, written: Some((upper, work)), userxattr: *userxattr };
            if let (Some((users, groups)), Some(_)) = (around.users, around.namespace(Namespace::User)) {
                let owner = on_host(0, Some(users)).zip(on_host(0, Some(groups)));
                let (uid, gid) =
                    owner.ok_or_else(|| failure("uid 0 of the container is not mapped in the user namespace"))?;
                rustix::fs::chown(upper.as_path(), Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
                    .context(|| format!("change owner of {} to root of the container", upper.display()))?;
            }
            over.mount(stage, "root", around)?;
            mount_api::clone_path(&stage.join("root"), MountScope::Top).context(|| "clone root mount")?
        }
        RootKind::Directory(path) => {
            let what = || format!("clone root mount {}", path.display());
            let taken = mount_api::clone_path(path, MountScope::Tree).context(what)?;
            if let Some(users) = around.namespace(Namespace::User) {
                mounts::idmap(taken.as_fd(), users.as_fd(), path)?;
            }
            taken
        }
    };
    let change = Change { propagation: libc::MS_PRIVATE, ..Change::default() };
    mount_api::change(root.as_fd(), MountScope::Tree, change).context(|| "set root mount private")?;
    Ok(root)
}

/// Mounts layers of an image as a detached read-only mount, idmapped like the root (spec 09a §8.3).
pub(super) fn layers(
    alone: SingleThreaded,
    plan: &LaunchPlan,
    wanted: &Mount,
    around: &PodContext<'_>,
) -> Step<PreparedMount> {
    let MountKind::Layers { layers, lower, sub_path } = &wanted.source else {
        return Err(failure("mount source is not a list of layers"));
    };
    let what = || format!("ImageVolumeMountFailed: mount an image on {}", wanted.target);
    let over = plan.root.stage.join("volume");
    // The kernel requires two layers or more for an overlay without an upper directory.
    let whole = match lower.as_slice() {
        [only] => layers.join(only),
        _ => {
            let all = OverlayMount { layers, lower, written: None, userxattr: false };
            all.mount(&plan.root.stage, "volume", around)?;
            over.clone()
        }
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(CWD, &whole, flags, Mode::empty()).context(what)?;
    let part = in_root::open(opened.as_fd(), Path::new(sub_path)).context(what)?;
    let taken = mount_api::clone_at(part.as_fd(), MountScope::Top).context(what)?;
    if whole == over {
        umount2(&over, MntFlags::MNT_DETACH).context(what)?;
    } else if let Some(users) = around.namespace(Namespace::User) {
        mounts::idmap(taken.as_fd(), users.as_fd(), &whole)?;
    }
    let change = Change { set: libc::MOUNT_ATTR_RDONLY, propagation: libc::MS_PRIVATE, ids: None };
    mount_api::change(taken.as_fd(), MountScope::Top, change).context(what)?;
    mounts::apply_attributes(alone, taken.as_fd(), wanted, around)?;
    Ok(PreparedMount::Tree { is_directory: mounts::is_directory(taken.as_fd()).context(what)?, mount: taken })
}

/// An overlayfs mount.
struct OverlayMount<'a> {
    layers: &'a Path,
    lower: &'a [String],
    written: Option<(&'a Path, &'a Path)>,
    userxattr: bool,
}

impl<'a> OverlayMount<'a> {
    /// Mounts the overlay on a new directory of the stage.
    fn mount(&self, stage: &Path, name: &str, around: &PodContext<'_>) -> Step<()> {
        let target = stage.join(name);
        make_directory(&target)?;
        let lower = match around.namespace(Namespace::User) {
            Some(users) => {
                let names = self.mapped(&stage.join(format!("{name}-layers")), users)?;
                rustix::process::chdir(stage).context(|| "change to staging directory")?;
                names
            }
            None => {
                // Relative names are short: more layers fit.
                rustix::process::chdir(self.layers)
                    .context(|| format!("change to directory {}", self.layers.display()))?;
                self.lower.iter().map(PathBuf::from).collect()
            }
        };
        let data = options(&lower, self.written, self.userxattr);
        if data.len() > LONGEST {
            return Err(failure(format!("overlay options of {} layers exceed the kernel's limit", lower.len())));
        }
        let done = mount(Some("overlay"), &target, Some("overlay"), MsFlags::empty(), Some(data.as_str()));
        rustix::process::chdir(stage).context(|| "change to staging directory")?;
        done.context(|| format!("mount overlay {data} on {}", target.display()))
    }

    /// Mounts every layer idmapped for the container; returns their names relative to the stage.
    fn mapped(&self, folder: &Path, users: &OwnedFd) -> Step<Vec<PathBuf>> {
        make_directory(folder)?;
        let name = folder.file_name().unwrap_or_default();
        let mut names = Vec::new();
        for (index, lower) in self.lower.iter().enumerate() {
            let (source, target) = (self.layers.join(lower), folder.join(index.to_string()));
            let what = || format!("clone mount of layer {}", source.display());
            make_directory(&target)?;
            let taken = mount_api::clone_path(&source, MountScope::Top).context(what)?;
            mounts::idmap(taken.as_fd(), users.as_fd(), &source)?;
            let at = rustix::fs::openat(CWD, &target, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).context(what)?;
            mount_api::attach(taken.as_fd(), at.as_fd()).context(what)?;
            names.push(Path::new(name).join(index.to_string()));
        }
        Ok(names)
    }
}

fn make_directory(path: &Path) -> Step<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        done => done.context(|| format!("create {}", path.display())),
    }
}

fn options(lower: &[PathBuf], written: Option<(&Path, &Path)>, userxattr: bool) -> String {
    let lower: Vec<String> = lower.iter().map(|path| escaped(path)).collect();
    let mut data = format!("lowerdir={}", lower.join(":"));
    if let Some((upper, work)) = written {
        data.push_str(&format!(",upperdir={},workdir={}", escaped(upper), escaped(work)));
    }
    if userxattr {
        data.push_str(",userxattr");
    }
    data
}

/// Escapes characters that have a meaning in overlayfs options.
fn escaped(path: &Path) -> String {
    let text = path.display().to_string();
    text.replace('\\', "\\\\").replace(':', "\\:").replace(',', "\\,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_names_layers_from_top_to_bottom() {
        let lower = [PathBuf::from("12/d"), PathBuf::from("3/d")];
        assert_eq!(options(&lower, None, false), "lowerdir=12/d:3/d");
        let written = Some((Path::new("/a:b/u"), Path::new("/a,b/w")));
        let expected = "lowerdir=12/d:3/d,upperdir=/a\\:b/u,workdir=/a\\,b/w,userxattr";
        assert_eq!(options(&lower, written, true), expected);
    }
}
