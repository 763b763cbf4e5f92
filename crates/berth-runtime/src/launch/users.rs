//! User, groups, and home directory of a container's processes. Pure.
//! Implements spec 09a §6.4.

use std::collections::BTreeSet;

use super::{image::LaunchImage, refusal::LaunchError};
use berth_proto::cri;

/// Largest valid user or group id.
const LARGEST: i64 = (1 << 31) - 1;

/// User and group ids of a container's processes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProcessUser {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// All group ids, sorted, including the primary one.
    pub groups: Vec<u32>,
    /// Home directory from the image's `/etc/passwd`, if it has an entry for the user.
    pub home: Option<String>,
}

/// An entry of `/etc/passwd`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct User {
    name: String,
    uid: u32,
    gid: u32,
    home: String,
}

/// An entry of `/etc/group`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Group {
    name: String,
    gid: u32,
    members: Vec<String>,
}

/// Determines the identity from the request and the image's accounts. The first matching entry applies.
///
/// # Errors
/// The texts of spec 09a §6.4.
pub fn identity(
    context: &cri::LinuxContainerSecurityContext,
    image: &LaunchImage,
    devices: &[u32],
) -> Result<ProcessUser, LaunchError> {
    let wanted = wanted(context, image)?;
    let users = users(&image.passwd);
    let groups = groups(&image.group);
    let (name, group) = match wanted.split_once(':') {
        Some((_, group)) if group.contains(':') => {
            return Err(LaunchError::plain(format!("invalid USER value {wanted:?}")));
        }
        Some((name, group)) => (name, Some(group)),
        None => (wanted.as_str(), None),
    };
    let (uid, account) = user(name, &wanted, &users)?;
    let gid = match group {
        Some(group) => gid(group, &wanted, &groups)?,
        None => account.map_or(0, |account| account.gid),
    };
    let mut all: BTreeSet<u32> = devices.iter().copied().chain([gid]).collect();
    for &extra in &context.supplemental_groups {
        all.insert(
            in_range(extra)
                .ok_or_else(|| LaunchError::plain(format!("invalid supplemental group {extra}: gid out of range")))?,
        );
    }
    match cri::SupplementalGroupsPolicy::try_from(context.supplemental_groups_policy) {
        Ok(cri::SupplementalGroupsPolicy::Merge) => {
            let of = |group: &&Group| account.is_some_and(|a| group.members.contains(&a.name));
            all.extend(groups.iter().filter(of).map(|group| group.gid));
        }
        Ok(cri::SupplementalGroupsPolicy::Strict) => {}
        Err(_) => {
            let number = context.supplemental_groups_policy;
            return Err(LaunchError::invalid(format!("not implemented: SupplementalGroupsPolicy={number}")));
        }
    }
    let home = users.iter().find(|user| user.uid == uid).map(|user| user.home.clone());
    Ok(ProcessUser { uid, gid, groups: all.into_iter().collect(), home })
}

/// The effective USER value: `user`, `user:group`, or empty.
fn wanted(context: &cri::LinuxContainerSecurityContext, image: &LaunchImage) -> Result<String, LaunchError> {
    let number = context.run_as_user.as_ref().map(|id| id.value.to_string()).unwrap_or_default();
    let user = if context.run_as_username.is_empty() { number } else { context.run_as_username.clone() };
    match &context.run_as_group {
        Some(group) if user.is_empty() => {
            Err(LaunchError::plain(format!("user group \"{}\" is specified without user", group.value)))
        }
        Some(group) => Ok(format!("{user}:{}", group.value)),
        None if user.is_empty() => Ok(image.config.user.clone()),
        None => Ok(user),
    }
}

fn user<'a>(name: &str, wanted: &str, users: &'a [User]) -> Result<(u32, Option<&'a User>), LaunchError> {
    if name.is_empty() {
        return Ok((0, users.iter().find(|user| user.uid == 0)));
    }
    if let Some(number) = number(name) {
        let uid = in_range(number)
            .ok_or_else(|| LaunchError::plain(format!("invalid USER value {wanted:?}: uid out of range")))?;
        return Ok((uid, users.iter().find(|user| user.uid == uid)));
    }
    let account = users.iter().find(|user| user.name == name).ok_or_else(|| LaunchError::plain("no users found"))?;
    Ok((account.uid, Some(account)))
}

fn gid(name: &str, wanted: &str, groups: &[Group]) -> Result<u32, LaunchError> {
    if let Some(number) = number(name) {
        return in_range(number)
            .ok_or_else(|| LaunchError::plain(format!("invalid USER value {wanted:?}: gid out of range")));
    }
    let group = groups.iter().find(|group| group.name == name).ok_or_else(|| LaunchError::plain("no groups found"))?;
    Ok(group.gid)
}

/// Parses a number. Digits are never a user or group name; a value beyond 64 bits becomes out of range
/// (CVE-2026-46680).
fn number(name: &str) -> Option<i64> {
    let digits = name.strip_prefix(['+', '-']).unwrap_or(name);
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| name.parse().unwrap_or(i64::MAX))
}

fn in_range(number: i64) -> Option<u32> {
    (0..=LARGEST).contains(&number).then(|| u32::try_from(number).ok()).flatten()
}

/// Parses `name:password:uid:gid:comment:home:shell`; skips malformed lines.
fn users(text: &[u8]) -> Vec<User> {
    let line = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?.to_owned();
        let uid = in_range(fields.nth(1)?.parse().ok()?)?;
        let gid = in_range(fields.next()?.parse().ok()?)?;
        Some(User { name, uid, gid, home: fields.nth(1).unwrap_or_default().to_owned() })
    };
    lines(text).filter_map(|text| line(&text)).collect()
}

/// Parses `name:password:gid:member,member`; skips malformed lines.
fn groups(text: &[u8]) -> Vec<Group> {
    let line = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?.to_owned();
        let gid = in_range(fields.nth(1)?.parse().ok()?)?;
        let members = fields.next().unwrap_or_default().split(',').filter(|m| !m.is_empty());
        Some(Group { name, gid, members: members.map(|m| m.trim().to_owned()).collect() })
    };
    lines(text).filter_map(|text| line(&text)).collect()
}

fn lines(text: &[u8]) -> impl Iterator<Item = String> {
    text.split(|b| *b == b'\n').map(|line| String::from_utf8_lossy(line).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::{super::image::ImageConfig, *};

    const PASSWD: &[u8] =
        b"root:x:0:0:root:/root:/bin/sh\n\nbroken\nx:y:z:1::\nwww-data:x:33:34:www:/var/www:/bin/false\n\
                            default-user:x:1000:1000::/home/default-user:/bin/sh\nagain:x:1000:5::/other:\n#c\n";
    const GROUP: &[u8] = b"root:x:0:\nwww-data:x:33:\nstaff:x:50:www-data\nnone\n\
                           group-defined-in-image:x:50000:default-user,www-data\nodd:x:-1:default-user\n";

    struct Row {
        name: &'static str,
        image: &'static str,
        user: Option<i64>,
        username: &'static str,
        group: Option<i64>,
        extra: &'static [i64],
        policy: i32,
    }

    const PLAIN: Row = Row { name: "", image: "", user: None, username: "", group: None, extra: &[], policy: 0 };

    fn is(row: Row, expected: Result<(u32, u32, &[u32]), &str>) {
        let context = cri::LinuxContainerSecurityContext {
            run_as_user: row.user.map(|value| cri::Int64Value { value }),
            run_as_username: row.username.to_owned(),
            run_as_group: row.group.map(|value| cri::Int64Value { value }),
            supplemental_groups: row.extra.to_vec(),
            supplemental_groups_policy: row.policy,
            ..Default::default()
        };
        let config = ImageConfig { user: row.image.to_owned(), ..ImageConfig::default() };
        let image = LaunchImage { config, passwd: PASSWD.to_vec(), group: GROUP.to_vec(), ..LaunchImage::default() };
        let got = identity(&context, &image, &[]).map_err(|refusal| refusal.text);
        let got = got.as_ref().map(|id| (id.uid, id.gid, &*id.groups)).map_err(String::as_str);
        assert_eq!(got, expected, "{}", row.name);
    }

    #[test]
    fn users_and_groups_come_from_request_image_and_accounts() {
        is(Row { name: "nobody said", ..PLAIN }, Ok((0, 0, &[0])));
        is(Row { name: "AC-09a-X4", user: Some(1001), ..PLAIN }, Ok((1001, 0, &[0])));
        is(
            Row { name: "AC-09a-X3", group: Some(5), image: "33", ..PLAIN },
            Err("user group \"5\" is specified without user"),
        );
        is(Row { name: "number of the image", image: "33", ..PLAIN }, Ok((33, 34, &[34, 50, 50_000])));
        is(Row { name: "name of the image", image: "www-data", ..PLAIN }, Ok((33, 34, &[34, 50, 50_000])));
        is(Row { name: "name and group", image: "www-data:staff", ..PLAIN }, Ok((33, 50, &[50, 50_000])));
        is(Row { name: "numbers", image: "1003:1004", ..PLAIN }, Ok((1003, 1004, &[1004])));
        is(Row { name: "request first", image: "33", user: Some(0), ..PLAIN }, Ok((0, 0, &[0])));
        is(Row { name: "name first", user: Some(5), username: "www-data", ..PLAIN }, Ok((33, 34, &[34, 50, 50_000])));
        is(Row { name: "group asked", user: Some(1000), group: Some(7), ..PLAIN }, Ok((1000, 7, &[7, 50_000])));
        is(Row { name: "no such user", username: "bob", ..PLAIN }, Err("no users found"));
        is(Row { name: "no such group", image: "0:bob", ..PLAIN }, Err("no groups found"));
        is(
            Row { name: "too large", image: "2147483648", ..PLAIN },
            Err("invalid USER value \"2147483648\": uid out of range"),
        );
        is(Row { name: "below", user: Some(-1), ..PLAIN }, Err("invalid USER value \"-1\": uid out of range"));
        is(
            Row { name: "group too large", image: "1:2147483648", ..PLAIN },
            Err("invalid USER value \"1:2147483648\": gid out of range"),
        );
        // Digits are never a name, whatever the image's account files contain.
        is(
            Row { name: "more than 64 bits", image: "99999999999999999999", ..PLAIN },
            Err("invalid USER value \"99999999999999999999\": uid out of range"),
        );
        is(
            Row { name: "group of more than 64 bits", image: "1:99999999999999999999", ..PLAIN },
            Err("invalid USER value \"1:99999999999999999999\": gid out of range"),
        );
        is(Row { name: "three parts", image: "a:b:c", ..PLAIN }, Err("invalid USER value \"a:b:c\""));
    }

    #[test]
    fn policies_decide_about_the_images_groups() {
        let row = Row { user: Some(1000), extra: &[1234, 1000, 1234], ..PLAIN };
        is(Row { name: "merge", ..row }, Ok((1000, 1000, &[1000, 1234, 50_000])));
        is(Row { name: "strict", policy: 1, ..row }, Ok((1000, 1000, &[1000, 1234])));
        is(Row { name: "unknown", policy: 2, ..row }, Err("not implemented: SupplementalGroupsPolicy=2"));
        is(Row { name: "out of range", extra: &[-1], ..row }, Err("invalid supplemental group -1: gid out of range"));
    }

    #[test]
    fn homes_are_found_by_number() {
        let config = ImageConfig { user: "1000".into(), ..ImageConfig::default() };
        let image = LaunchImage { config, passwd: PASSWD.to_vec(), ..LaunchImage::default() };
        let got = identity(&Default::default(), &image, &[9]).expect("an identity");
        assert_eq!((got.home.as_deref(), got.groups), (Some("/home/default-user"), vec![9, 1000]));
    }
}
