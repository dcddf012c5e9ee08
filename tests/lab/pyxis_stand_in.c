/*
 * Stands in for pyxis, which Debian does not have: a SPANK plugin that shows a job what it can notice of pyxis.
 * It is no pyxis: the container is a namespace with an overlay over the mounted image (pyxis_stand_in.py).
 * Written from pyxis' documentation and from what pyxis 0.24 was seen to do; no code of it is in here.
 *
 * plugstack.conf: required …/pyxis_stand_in.so HELPER, where HELPER is the program that does all but these calls.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis_stand_in, 1)

enum { IMAGE, NAME, MOUNTS, WORKDIR, ENV, WRITABLE, HOME, ENTRYPOINT, OPTIONS };

static const char *given[OPTIONS];
static int failed, killed;

static int take(int option, const char *value, int remote)
{
	(void)remote;
	given[option] = strdup(value ? value : "");
	return 0;
}

#define SAYS "[stands in for pyxis] "
struct spank_option spank_options[] = {
	{"container-image", "PATH", SAYS "the image that the step runs in", 1, IMAGE, take},
	{"container-name", "NAME", SAYS "keep the container's files under this name", 1, NAME, take},
	{"container-mounts", "SRC:DST[:FLAGS]", SAYS "what the container sees of the host", 1, MOUNTS, take},
	{"container-workdir", "PATH", SAYS "where the program begins", 1, WORKDIR, take},
	{"container-env", "NAME,…", SAYS "variables of the job that win over the image's", 1, ENV, take},
	{"container-writable", NULL, SAYS "let the program write into the container", 0, WRITABLE, take},
	{"no-container-mount-home", NULL, SAYS "without effect: no home is ever mounted", 0, HOME, take},
	{"no-container-entrypoint", NULL, SAYS "without effect: no entrypoint ever runs", 0, ENTRYPOINT, take},
	SPANK_OPTIONS_TABLE_END
};

static int in_container(spank_t sp)
{
	return spank_remote(sp) == 1 && (given[IMAGE] || given[NAME]);
}

/* The name of the container's files: that of the step, which Slurm uses again after a requeue, unless it was given. */
static char *rootfs(spank_t sp)
{
	uint32_t job = 0, step = 0;
	char *name = NULL;

	spank_get_item(sp, S_JOB_ID, &job);
	spank_get_item(sp, S_JOB_STEPID, &step);
	if (given[NAME] ? asprintf(&name, "pyxis_%s", given[NAME]) < 0 : asprintf(&name, "pyxis_%u.%u", job, step) < 0)
		abort();
	return name;
}

/* Run the helper with the job's variables. Its output, up to `size` bytes, goes to `out`, its length to *length.
 * Errors, which begin with [, are shown to the user. */
static int help(spank_t sp, char **av, const char *command, char *out, size_t size, size_t *length)
{
	char *name = rootfs(sp), **env = NULL;
	const char *line[OPTIONS + 3] = {av[0], command, name};
	int pipes[2], status = 0;
	ssize_t got;
	pid_t child;

	for (int i = 0; i < ENTRYPOINT; i++)
		line[3 + i] = given[i] ? given[i] : "";
	line[3 + WRITABLE] = given[WRITABLE] ? "yes" : "";
	line[3 + HOME] = NULL;
	spank_get_item(sp, S_JOB_ENV, &env);
	if (pipe(pipes) || (child = fork()) < 0)
		return -1;
	if (child == 0) {
		dup2(pipes[1], 1);
		dup2(pipes[1], 2);
		close(pipes[0]);
		close(pipes[1]);
		/* At the end of a step, Slurm 24.11 ends all children of slurmstepd, where no cgroup says which are tasks. */
		if (!strcmp(command, "remove"))
			signal(SIGTERM, SIG_IGN);
		execve(line[0], (char **)line, env);
		_exit(127);
	}
	close(pipes[1]);
	*length = 0;
	while (*length < size - 1 && (got = read(pipes[0], out + *length, size - 1 - *length)) > 0)
		*length += got;
	out[*length] = 0;
	close(pipes[0]);
	waitpid(child, &status, 0);
	if (status)
		slurm_error("pyxis: %s", out);
	free(name);
	return status ? -1 : 0;
}

/* Once for a step on each node, before its tasks. srun would end with 0 where this fails, so pyxis fails later, too. */
int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	char out[4096];
	size_t length;

	(void)ac;
	if (!in_container(sp))
		return 0;
	failed = help(sp, av, "create", out, sizeof(out), &length);
	if (failed)
		slurm_error("pyxis: failed to create container filesystem");
	return 0;
}

/* The process that becomes the program: the helper prints where it begins, and then variables, each with a zero. */
int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	static char out[1 << 20];
	char where[4096], *one, *equals, *name;
	size_t length;

	(void)ac;
	if (!in_container(sp))
		return 0;
	if (failed || unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_SLAVE, NULL))
		return -1;
	if (help(sp, av, "enter", out, sizeof(out), &length)) {
		slurm_error("pyxis: couldn't start container");
		return -1;
	}
	for (one = out + strlen(out) + 1; one < out + length; one += strlen(one) + 1)
		if ((equals = strchr(one, '='))) {
			*equals = 0;
			spank_setenv(sp, one, equals + 1, 1);
			one = equals + 1;
		}
	name = rootfs(sp);
	snprintf(where, sizeof(where), "/run/enroot/%s/root", name);
	free(name);
	if (chroot(where) || chdir(out)) {
		slurm_error("pyxis: couldn't chdir to %s: No such file or directory", out);
		return -1;
	}
	return 0;
}

int slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	int status = 0;

	(void)ac, (void)av;
	if (in_container(sp) && !spank_get_item(sp, S_TASK_EXIT_STATUS, &status) && WIFSIGNALED(status))
		killed = 1;
	return 0;
}

/* The files of a container without a name are removed; those of a step that was killed were seen to stay. */
int slurm_spank_exit(spank_t sp, int ac, char **av)
{
	char out[4096];
	size_t length;

	(void)ac;
	if (!in_container(sp) || given[NAME] || failed || killed)
		return 0;
	return help(sp, av, "remove", out, sizeof(out), &length);
}
